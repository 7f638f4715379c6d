"""Sample answers to held-out problems from the serving engine and grade them."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tepo_megatron.evaluation.statistics import standard_error
from tepo_megatron.inference.engine import Sampler
from tepo_megatron.rewards import WeightedReward
from tepo_megatron.rollout.containment import report_lost
from tepo_megatron.types import Prompt, Rollout, SamplingParams, split_samples
from tepo_megatron.utils.loop import LoopFuture


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on held-out problems.

    Attributes:
        mean: Mean over problems of their mean scores, in [0, 1].
        standard_error: Standard error of `mean`, clustered by problem; None for a single problem.
        samples: Samples per problem.
        scores: Problem id -> mean score of its samples.
        lost: Samples that `rollout.function` lost; they count as wrong.
    """

    mean: float
    standard_error: float | None
    problems: int
    samples: int
    scores: Mapping[int, float]
    lost: int = 0

    def state(self) -> dict[str, Any]:
        """Return the accuracy as plain JSON, which `of` reads."""
        return {**vars(self), "scores": [[problem, score] for problem, score in self.scores.items()]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Accuracy":
        """Restore an accuracy from what `state` returned."""
        return cls(**{**state, "scores": dict(state["scores"])})

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        lost = f", {self.lost} of them lost" if self.lost else ""
        return f"{self.mean:.3f}{error} ({self.problems} problems x {self.samples} samples{lost})"


def evaluate(
    engine: Sampler,
    reward: WeightedReward,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    seed: int,
    *,
    max_failed_share: float,
) -> Accuracy:
    """Sample answers, grade them and return the mean unshaped score.

    Raises:
        RolloutError: The engine fails, or too many samples were lost.
        RewardError: The grader fails.
    """
    found = sample_and_grade(engine, reward, prompts, sampling, seed, what="evaluation", max_failed_share=max_failed_share)
    return accuracy(found)


def sample_and_grade(
    engine: Sampler,
    reward: WeightedReward,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    seed: int,
    *,
    what: str,
    max_failed_share: float,
) -> list[Rollout]:
    """Return the graded samples by prompt and sample index. Groups are graded while others are still being sampled.

    Raises:
        RolloutError, RewardError: See `evaluate`.
    """
    groups = engine.open()
    try:
        groups.add(prompts, sampling, seed)
        grading: dict[int, LoopFuture[list[Rollout]]]
        grading = {group[0].prompt_id: reward.submit(group) for group in iter(groups.next, None)}
        rollouts = [sample[-1] for prompt in prompts for sample in split_samples(grading[prompt.id].result())]
    finally:
        groups.close()
    report_lost(what, [rollout.failure for rollout in rollouts if rollout.failure], len(rollouts), max_failed_share)
    return rollouts


def accuracy(rollouts: Sequence[Rollout]) -> Accuracy:
    """Return the accuracy of graded rollouts, which must be grouped by prompt, with equally many each.

    Samples of one problem are not independent, so the standard error is that of the mean over problems. With one sample each
    this is sqrt(p (1 - p) / (n - 1)).
    """
    groups = itertools.groupby(rollouts, key=lambda r: r.prompt_id)
    scores = {problem: statistics.fmean(r.score for r in group) for problem, group in groups}
    means = list(scores.values())
    lost = sum(bool(rollout.failure) for rollout in rollouts)
    return Accuracy(statistics.fmean(means), standard_error(means), len(means), len(rollouts) // len(means), scores, lost)
