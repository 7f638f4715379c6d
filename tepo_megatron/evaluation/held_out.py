"""Evaluate held-out problems, and keep each problem's score before and after a run in `evaluation.jsonl`."""

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.base import records
from tepo_megatron.base.errors import DataError
from tepo_megatron.base.loop import LoopFuture
from tepo_megatron.base.storage import replace_file
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams, split_samples
from tepo_megatron.engines.engine import Sampler
from tepo_megatron.evaluation.statistics import standard_error
from tepo_megatron.rewards.terms import WeightedReward
from tepo_megatron.rollout.containment import report_lost


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on held-out problems."""

    mean: float  # mean over problems of their mean scores, in [0, 1]
    standard_error: float | None  # standard error of `mean`, clustered by problem; None for a single problem
    problems: int
    samples: int  # samples per problem
    scores: Mapping[int, float]  # problem id -> mean score of its samples
    lost: int = 0  # samples that `rollout.function` lost; they count as wrong

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
    """Sample answers, grade them and return the mean unshaped score. Raises as `sample_and_grade`."""
    graded = sample_and_grade(engine, reward, prompts, sampling, seed, what="evaluation", max_failed_share=max_failed_share)
    return accuracy(graded)


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
        RolloutError: The engine fails, or too many samples were lost.
        RewardError: The grader fails.
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


EVALUATION_FILE = "evaluation.jsonl"


@dataclass(frozen=True)
class Scores:
    """Mean unshaped score of each problem's samples, by problem id (its line in the dataset, from 0)."""

    before: dict[int, float]
    after: dict[int, float]


def write_evaluation(run_dir: Path, before: Accuracy, after: Accuracy) -> Path:
    """Write one line per problem, in the order of the dataset; return the file's path. The file is replaced atomically.

    A line is {"problem", "before", "after", "of": number of problems}, so that a missing line can be detected.
    """
    rows = [
        {"problem": problem, "before": before.scores[problem], "after": score, "of": len(after.scores)}
        for problem, score in after.scores.items()
    ]
    path = run_dir / EVALUATION_FILE
    replace_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return path


def read_evaluation(run_dir: Path) -> Scores:
    """Return what `write_evaluation` wrote, as far as lines can be read; warn of the rest.

    Raises DataError that names the file if it cannot be read.
    """
    scores, faults = read_scores(run_dir)
    records.report(run_dir / EVALUATION_FILE, faults)
    return scores


def read_scores(run_dir: Path) -> tuple[Scores, list[str]]:
    """Return the scores as far as lines can be read, and one sentence per fault of the file.

    Raises DataError that names the file if it cannot be read.
    """
    path = run_dir / EVALUATION_FILE
    try:
        rows, faults = records.read_rows(path, _row)
    except OSError as e:
        raise DataError(f"{path}: cannot read the evaluations ({e.strerror}); repeat the run, with data.eval") from None
    scores = Scores({}, {})
    for problem, before, after, _ in rows:
        scores.before[problem], scores.after[problem] = before, after
    if len(rows) > len(scores.after):
        faults.append(f"{len(rows) - len(scores.after)} problems are in the file twice; the later line counts")
    of = max((of for *_, of in rows if of is not None), default=None)
    if of is not None and of > len(scores.after):
        faults.append(f"the scores of {of - len(scores.after)} of {of} problems are missing, so the means are over the others")
    return scores, faults


def _row(row: dict[str, Any]) -> tuple[int, float, float, int | None]:
    """Return (problem, before, after, of). Raises ValueError, TypeError, KeyError or OverflowError for an invalid row."""
    problem, before, after, of = row["problem"], float(row["before"]), float(row["after"]), row.get("of")
    if type(problem) is not int or type(of) not in (int, type(None)):
        raise ValueError("not the scores of a problem")
    if not math.isfinite(before) or not math.isfinite(after):
        raise ValueError("a score is not finite")
    return problem, before, after, of
