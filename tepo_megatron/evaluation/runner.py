"""Sample answers to held-out problems from the serving engine and grade them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tepo_megatron.evaluation.statistics import standard_error
from tepo_megatron.rewards import Reward
from tepo_megatron.rollout.engine import RolloutEngine
from tepo_megatron.types import Prompt, Rollout, SamplingParams


@dataclass(frozen=True)
class Accuracy:
    """mean: of the problems' means, in [0, 1]; standard_error: clustered by problem, None for one; samples: per problem;
    scores: problem id -> mean score of its samples.
    """

    mean: float
    standard_error: float | None
    problems: int
    samples: int
    scores: Mapping[int, float]

    def state(self) -> dict[str, Any]:
        """Plain JSON, from which `of` makes it again."""
        return {**vars(self), "scores": [[problem, score] for problem, score in self.scores.items()]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Accuracy:
        """From `state`."""
        return cls(**{**state, "scores": dict(state["scores"])})

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        return f"{self.mean:.3f}{error} ({self.problems} problems x {self.samples} samples)"


def evaluate(engine: RolloutEngine, reward: Reward, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> Accuracy:
    """Mean unshaped score of `sampling.samples` answers to each prompt."""
    return accuracy(reward.score(engine.generate(prompts, sampling, seed)))


def accuracy(rollouts: Sequence[Rollout]) -> Accuracy:
    """Samples of one problem are not independent of each other: the error is that of the mean over problems.

    With one sample each this is sqrt(p (1 - p) / (n - 1)).
    """
    groups = itertools.groupby(rollouts, key=lambda r: r.prompt_id)
    scores = {problem: statistics.fmean(r.score for r in group) for problem, group in groups}
    means = list(scores.values())
    return Accuracy(statistics.fmean(means), standard_error(means), len(means), len(rollouts) // len(means), scores)
