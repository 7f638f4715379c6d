"""What an ablation says of its runs, and how sure that is. Pure functions of scores and curves.

Problems are the unit of chance: the samples of a problem, and its scores under several seeds, are averaged first, and the
standard error is that over problems. What would change with other seeds is NOT in it; with few seeds nothing honest can be
computed for that, so each seed's number is shown beside the mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

WINDOW = 5  # steps
SHARE_OF_BEST = 0.9
NORMAL_95 = statistics.NormalDist().inv_cdf(0.975)  # 1.96: half of a 95 % interval, in standard errors

Scores = Mapping[int, float]  # problem id -> mean score of its samples, in [0, 1]


@dataclass(frozen=True)
class Estimate:
    """A mean over problems. standard_error: over problems, None for a single one; by_seed: the same mean for each seed."""

    mean: float
    standard_error: float | None
    by_seed: Mapping[int, float]

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %, by the normal approximation; None without a standard error."""
        if self.standard_error is None:
            return None
        half = NORMAL_95 * self.standard_error
        return self.mean - half, self.mean + half

    @property
    def covers_zero(self) -> bool:
        """Whether 0 lies in the interval; an unknown interval covers everything."""
        return self.interval is None or self.interval[0] <= 0 <= self.interval[1]

    @property
    def seeds_agree_in_sign(self) -> bool:
        """Whether every seed alone points the same way (a seed at 0 points nowhere)."""
        signs = {math.copysign(1, value) if value else 0 for value in self.by_seed.values()}
        return len(signs) == 1 and 0 not in signs


def over_problems(by_seed: Mapping[int, Scores]) -> Estimate:
    """Mean over seeds and problems of one run's scores. Raises ValueError where the seeds have different problems, or none."""
    problems = {frozenset(scores) for scores in by_seed.values()}
    if len(problems) != 1 or not all(problems):
        raise ValueError("the seeds were not evaluated on the same problems")
    means = [statistics.fmean(scores[problem] for scores in by_seed.values()) for problem in next(iter(by_seed.values()))]
    seed_means = {seed: statistics.fmean(scores.values()) for seed, scores in by_seed.items()}
    return Estimate(statistics.fmean(means), standard_error(means), seed_means)


def paired_difference(run: Mapping[int, Scores], baseline: Mapping[int, Scores]) -> Estimate | None:
    """run - baseline, problem by problem, over the seeds that both have (None without any).

    Raises ValueError where the two have different problems.
    """
    common = [seed for seed in run if seed in baseline]
    if not common:
        return None
    if any(run[seed].keys() != baseline[seed].keys() for seed in common):
        raise ValueError("the two runs were not evaluated on the same problems")
    return over_problems({seed: {p: score - baseline[seed][p] for p, score in run[seed].items()} for seed in common})


def standard_error(values: Collection[float]) -> float | None:
    """Of their mean, as independent draws (ddof 1); None for fewer than two."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def steps_to_share_of_best(values: Sequence[float]) -> int | None:
    """The first step (from 1) at which the mean of the last WINDOW values reaches SHARE_OF_BEST of its own maximum.

    values: one per step, of a single run. None for fewer than WINDOW steps, where a value is missing (NaN), or where the mean
    never leaves 0.
    """
    if any(math.isnan(value) for value in values):
        return None
    trailing = [statistics.fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]
    best = max(trailing, default=0.0)
    if best <= 0:
        return None
    return WINDOW + next(i for i, mean in enumerate(trailing) if mean >= SHARE_OF_BEST * best)


def mean_of_last(values: Sequence[float]) -> float | None:
    """Mean of the last WINDOW values that are not NaN; None where all of these are."""
    known = [value for value in values[-WINDOW:] if not math.isnan(value)]
    return statistics.fmean(known) if known else None
