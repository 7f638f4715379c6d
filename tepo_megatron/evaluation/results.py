"""Compute results from the samples of benchmarks: of one benchmark, over all, and of two runs on the same problems."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tepo_megatron.base.errors import DataError
from tepo_megatron.evaluation.samples import BenchmarkSample
from tepo_megatron.evaluation.statistics import (
    PairedDifference,
    ScoreEstimate,
    difference,
    majority,
    pass_at_k,
    share,
    standard_error,
)


@dataclass(frozen=True)
class Result:
    """Result of one benchmark."""

    problems: int
    samples: int  # samples per problem, k
    accuracy: ScoreEstimate
    pass_at: Mapping[int, float]  # unbiased pass@i, for powers of two up to k, and for k
    # maj@k. Right answers count as one answer, however they are written; wrong answers differ as their texts do.
    majority: float
    truncated: float  # share of responses cut off at the length limit
    tokens: float  # mean length of a response in tokens
    unreadable: int  # number of problems whose gold answer math-verify cannot read; only its exact text counts as right
    # Mean over problems of the weighted sum of reward.terms, and its standard error. None: an earlier version kept no rewards.
    reward: float | None
    reward_error: float | None


@dataclass(frozen=True)
class BenchmarkComparison:
    """Comparison of two runs on one benchmark."""

    # ours, theirs: mean score of the first and the second run, in [0, 1]
    ours: float
    theirs: float
    difference: PairedDifference  # first minus second, paired by problem
    # Problems of which most samples are right in the first run, but not in the second. Half of the samples is not most.
    gained: tuple[int, ...]
    lost: tuple[int, ...]


def result(samples: Sequence[BenchmarkSample]) -> Result:
    """Return the result of a benchmark from all its samples. Raises DataError if problems have different numbers of samples."""
    groups = by_problem(samples)
    k = len(next(iter(groups.values())))
    right = {problem: [sample.score > 0 for sample in group] for problem, group in groups.items()}
    powers = sorted({2**i for i in range(k.bit_length())} | {k})
    known = all(sample.reward is not None for sample in samples)
    rewards = [statistics.fmean(s.reward or 0.0 for s in group) for group in groups.values()] if known else []
    return Result(
        problems=len(groups),
        samples=k,
        accuracy=share(list(scores(samples).values()), k),
        pass_at={p: statistics.fmean(pass_at_k(k, sum(verdicts), p) for verdicts in right.values()) for p in powers},
        majority=statistics.fmean(majority([_vote(s) for s in group], right[problem]) for problem, group in groups.items()),
        truncated=statistics.fmean(sample.stop == "length" for sample in samples),
        tokens=statistics.fmean(sample.tokens for sample in samples),
        unreadable=sum(any(sample.status == "bad_gold" for sample in group) for group in groups.values()),
        reward=statistics.fmean(rewards) if known else None,
        reward_error=standard_error(rewards),
    )


def by_problem(samples: Sequence[BenchmarkSample]) -> dict[int, list[BenchmarkSample]]:
    """Return the samples of each problem. Raises DataError if problems have different numbers of samples."""
    groups: dict[int, list[BenchmarkSample]] = {}
    for sample in samples:
        groups.setdefault(sample.problem, []).append(sample)
    counts = {len(group) for group in groups.values()}
    if len(counts) > 1:
        raise DataError(f"problems have {min(counts)} to {max(counts)} samples, not equally many; make the evaluation again")
    return groups


def scores(samples: Sequence[BenchmarkSample]) -> dict[int, float]:
    """Return problem -> mean score of its samples."""
    return {problem: statistics.fmean(s.score for s in group) for problem, group in by_problem(samples).items()}


def compare(ours: Sequence[BenchmarkSample], theirs: Sequence[BenchmarkSample], name: str) -> BenchmarkComparison:
    """Return the first run minus the second. Raises DataError unless they have the same problems and gold answers."""
    a, b = scores(ours), scores(theirs)
    golds_a, golds_b = ({s.problem: s.gold for s in samples} for samples in (ours, theirs))
    if golds_a != golds_b:
        wrong = sorted(p for p in a.keys() | b.keys() if golds_a.get(p) != golds_b.get(p))
        raise DataError(
            f"{name}: the two evaluations are not of the same problems: {len(wrong)} differ, the first of them row {wrong[0]}; "
            "evaluate both on the same file"
        )
    order = sorted(a)
    return BenchmarkComparison(
        ours=statistics.fmean(a.values()),
        theirs=statistics.fmean(b.values()),
        difference=difference([a[p] for p in order], [b[p] for p in order]),
        gained=tuple(p for p in order if a[p] > 0.5 >= b[p]),
        lost=tuple(p for p in order if b[p] > 0.5 >= a[p]),
    )


def over_samples(results: Mapping[str, Result]) -> float:
    """Return the mean over all samples of all benchmarks, which explains the paper's averages best (examples/paper)."""
    counts = {name: r.problems * r.samples for name, r in results.items()}
    return sum(counts[name] * r.accuracy.mean for name, r in results.items()) / sum(counts.values())


def over_benchmarks(results: Mapping[str, Result]) -> float:
    """Return the mean over benchmarks, with equal weights."""
    return statistics.fmean(r.accuracy.mean for r in results.values())


def _vote(sample: BenchmarkSample) -> str | None:
    """Return the sample's vote for maj@k: the same for all right answers, else the answer without spaces; None for none."""
    if sample.score > 0:
        return f"right: {sample.gold}"
    return None if not sample.answer else "".join(sample.answer.split())
