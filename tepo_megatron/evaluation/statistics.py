"""Statistics of evaluations: means, standard errors, intervals and tests. Pure functions of scores.

Problems are the unit of sampling: the samples of a problem, and its scores under several seeds, are averaged first, and every
error is over problems. It includes what other samples of the same problems would change. It does NOT include what another
training seed would change. For that, each seed's number is shown next to the mean and, from three seeds on, an interval over
seeds.
"""

import functools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

NORMAL = statistics.NormalDist()
NORMAL_95 = NORMAL.inv_cdf(0.975)  # 1.96: half of a 95 % interval, in standard errors
MIN_SEEDS = 3  # for an interval over seeds; that of two is 12.7 standard errors wide on each side
RESAMPLES = 2000  # resampled means of a bootstrap
_AT_ONCE = 2**20  # resampled problem counts held in memory at once

Scores = Mapping[int, float]  # problem id -> mean score of its samples, in [0, 1]


@dataclass(frozen=True)
class Estimate:
    """A mean over problems."""

    mean: float
    standard_error: float | None  # standard error over problems; None for a single problem
    by_seed: Mapping[int, float]  # the same mean for each seed alone

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval by the normal approximation; None without a standard error."""
        if self.standard_error is None:
            return None
        half = NORMAL_95 * self.standard_error
        return self.mean - half, self.mean + half

    @property
    def covers_zero(self) -> bool:
        """True if 0 lies in the interval. An unknown interval covers everything."""
        return self.interval is None or self.interval[0] <= 0 <= self.interval[1]

    @property
    def over_seeds(self) -> tuple[float, float] | None:
        """95 % interval over seeds by Student's t, each seed counting as one value; None for fewer than three seeds."""
        means, error = list(self.by_seed.values()), standard_error(self.by_seed.values())
        if error is None or len(means) < MIN_SEEDS:
            return None
        half = student_95(len(means) - 1) * error
        return statistics.fmean(means) - half, statistics.fmean(means) + half

    @property
    def seeds_agree_in_sign(self) -> bool:
        """True if the means of all seeds have the same sign. A mean of 0 has none."""
        signs = {math.copysign(1, value) if value else 0 for value in self.by_seed.values()}
        return len(signs) == 1 and 0 not in signs


def over_problems(by_seed: Mapping[int, Scores]) -> Estimate:
    """Return the mean over seeds and problems of one run's scores.

    Raises ValueError if the seeds have different problems, or if there are no seeds or problems.
    """
    problems = {frozenset(scores) for scores in by_seed.values()}
    if len(problems) != 1 or not all(problems):
        raise ValueError("the seeds were not evaluated on the same problems")
    means = [statistics.fmean(scores[problem] for scores in by_seed.values()) for problem in next(iter(by_seed.values()))]
    seed_means = {seed: statistics.fmean(scores.values()) for seed, scores in by_seed.items()}
    return Estimate(statistics.fmean(means), standard_error(means), seed_means)


def paired_difference(run: Mapping[int, Scores], baseline: Mapping[int, Scores]) -> Estimate | None:
    """Return run - baseline, problem by problem, over the seeds that both have; None if they share none.

    Raises ValueError if the two have different problems.
    """
    common = [seed for seed in run if seed in baseline]
    if not common:
        return None
    if any(run[seed].keys() != baseline[seed].keys() for seed in common):
        raise ValueError("the two runs were not evaluated on the same problems")
    return over_problems({seed: {p: score - baseline[seed][p] for p, score in run[seed].items()} for seed in common})


def standard_error(values: Collection[float]) -> float | None:
    """Return the standard error of the mean of independent values (ddof 1); None for fewer than two."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


Interval = tuple[float, float]


@dataclass(frozen=True)
class ScoreEstimate:
    """A mean of scores in [0, 1]. All but the mean are None for a single problem."""

    mean: float
    standard_error: float | None  # standard error, clustered by problem
    interval: Interval | None  # 95 % interval of `score_interval`
    bootstrap: Interval | None  # 95 % interval of `bootstrap_interval`


@dataclass(frozen=True)
class PairedDifference:
    """Paired difference of two runs on the same problems. The error and intervals are None for a single problem."""

    mean: float  # mean over problems of their differences
    standard_error: float | None
    interval: Interval | None  # 95 % interval by Student's t, clipped to [-1, 1]
    bootstrap: Interval | None  # 95 % interval of `bootstrap_interval`
    # better, worse, same: number of problems that score higher than with the baseline, lower, and the same
    better: int
    worse: int
    same: int
    sign_test: float

    def __str__(self) -> str:
        bounds = "" if self.interval is None else f" [{100 * self.interval[0]:+z.1f}, {100 * self.interval[1]:+z.1f}]"
        return f"{100 * self.mean:+z.1f} points{bounds}"

    @property
    def verdict(self) -> str:
        """Strongest statement that the interval supports."""
        within = self.interval is None or self.interval[0] <= 0 <= self.interval[1]
        return "within noise" if within else "beyond the noise of these problems"


def share(means: Sequence[float], samples: int) -> ScoreEstimate:
    """Return the mean over problems with its errors. Raises ValueError if there are no problems.

    Where a mean lies outside [0, 1], the interval is that of Student's t.
    """
    mean, error = statistics.fmean(means), standard_error(means)
    if error is None:
        return ScoreEstimate(mean, None, None, None)
    if all(0 <= each <= 1 for each in means):
        interval = score_interval(mean, error, len(means), samples)
    else:
        half = student_95(len(means) - 1) * error
        interval = mean - half, mean + half
    return ScoreEstimate(mean, error, interval, bootstrap_interval(means))


def difference(means: Sequence[float], baseline: Sequence[float]) -> PairedDifference:
    """Return means - baseline, problem by problem. Raises ValueError if the lists have different lengths or are empty."""
    changes = [a - b for a, b in zip(means, baseline, strict=True)]
    mean, error = statistics.fmean(changes), standard_error(changes)
    better, worse = sum(c > 0 for c in changes), sum(c < 0 for c in changes)
    interval = bootstrap = None
    if error is not None:
        half = student_95(len(changes) - 1) * error
        most = 1.0 if all(0 <= each <= 1 for each in (*means, *baseline)) else math.inf
        interval, bootstrap = (max(-most, mean - half), min(most, mean + half)), bootstrap_interval(changes)
    same = len(changes) - better - worse
    return PairedDifference(mean, error, interval, bootstrap, better, worse, same, sign_test(better, worse))


def score_interval(mean: float, error: float, problems: int, samples: int) -> Interval:
    """Return the 95 % interval of a mean of scores in [0, 1] whose standard error is clustered by problem.

    This is Wilson's interval, with Student's quantile of problems - 1 degrees of freedom, for the number of independent
    right-or-wrong answers that would have this error. The number lies between problems - 1 (the samples of a problem all agree,
    or nothing varies) and problems * samples. Unlike mean +- 2 errors, the interval stays in [0, 1], and does not shrink to a
    point if all answers are right or all wrong.
    """
    spread = mean * (1 - mean)
    answers = float(problems - 1) if spread <= 0 else spread / max(error**2, spread / (problems * samples))
    answers = max(answers, problems - 1.0)
    square = student_95(problems - 1) ** 2 / answers
    middle, half = mean + square / 2, math.sqrt(max(0.0, square * spread + square**2 / 4))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def bootstrap_interval(values: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Return the 95 % interval of the mean of one value per problem, by resampling whole problems.

    The quantiles of the resampled means lie further out than 2.5 %, as Student's t does from the normal distribution, and by
    the factor n / (n - 1) of the variance. Without this the interval is too narrow for few problems (Hesterberg, arXiv
    1411.5279, expanded percentile).
    """
    x, n = np.asarray(values, dtype=np.float64), len(values)
    rng = np.random.default_rng(seed)
    rows = max(1, _AT_ONCE // n)
    sizes = [min(rows, resamples - done) for done in range(0, resamples, rows)]
    means = np.concatenate([rng.multinomial(n, np.full(n, 1 / n), size=size) @ x / n for size in sizes])
    outside = NORMAL.cdf(-math.sqrt(n / (n - 1)) * student_95(n - 1))
    low, high = np.quantile(means, [outside, 1 - outside])
    return float(low), float(high)


@functools.cache
def student_95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t: half of a 95 % interval, in standard errors.

    It is found by bisection; above 1000 degrees of freedom by the first two correction terms of the expansion around the normal
    quantile (error below 1e-7).
    """
    if freedom > 1000:
        z = NORMAL_95
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    low, high = 0.0, 20.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return the probability of |T| <= t, a finite sum for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine, odd = math.sin(angle), math.cos(angle), freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for i in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * i / (i + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided p-value of the exact sign test.

    It is the probability of a split at least as uneven if both directions are equally likely. For single right-or-wrong answers
    this is McNemar's exact test.
    """
    n, fewer = better + worse, min(better, worse)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(fewer + 1)) / 2**n)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that at least one of k samples, drawn without replacement, is right: 1 - C(n - c, k) / C(n, k).

    This is the unbiased estimate of arXiv 2107.03374. Raises ValueError if not 0 <= right <= samples, or not 1 <= k <= samples.
    """
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {right} right among {samples} samples")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Return 1 if the most frequent answer is right, otherwise 0; if several tie, the share of them that is right."""
    votes: dict[str, list[bool]] = {}
    for answer, verdict in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(verdict)
    most = max((len(verdicts) for verdicts in votes.values()), default=0)
    first = [verdicts[0] for verdicts in votes.values() if len(verdicts) == most]
    return statistics.fmean(first) if first else 0.0
