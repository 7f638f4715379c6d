"""The statistics of evaluations against closed forms, published tables and simulation."""

import math
from itertools import combinations

import numpy as np
import pytest

from tepo_megatron.evaluation.statistics import (
    bootstrap_interval,
    difference,
    majority,
    pass_at_k,
    score_interval,
    share,
    sign_test,
    student_95,
)

EVALUATIONS = 2000
# a benchmark's problems, samples, and the parameters of the Beta distribution of the chance that a problem is solved
BENCHMARKS = {
    "aime": (30, 32, 0.3, 1.0),
    "amc": (83, 32, 0.5, 0.7),
    "math500": (500, 1, 1.5, 0.5),
    "minerva": (272, 1, 0.5, 1.0),
}


def simulated(name: str) -> tuple[float, int, np.ndarray]:
    """The true accuracy, the samples of a problem, and the problems' means of EVALUATIONS evaluations on other problems."""
    problems, samples, a, b = BENCHMARKS[name]
    rng = np.random.default_rng(1)
    chances = rng.beta(a, b, size=(EVALUATIONS, problems))
    return a / (a + b), samples, rng.binomial(samples, chances) / samples


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_interval_of_an_accuracy_covers_the_truth_in_95_of_100_evaluations(name: str) -> None:
    truth, samples, evaluations = simulated(name)
    errors = evaluations.std(axis=1, ddof=1) / math.sqrt(evaluations.shape[1])
    covered = 0
    for means, error in zip(evaluations, errors, strict=True):
        low, high = score_interval(means.mean(), error, len(means), samples)
        covered += low <= truth <= high
    assert 0.93 <= covered / EVALUATIONS <= 0.97
    found = share(evaluations[0].tolist(), samples)
    assert found.standard_error == pytest.approx(errors[0]) and found.mean == pytest.approx(evaluations[0].mean())


@pytest.mark.slow
def test_the_bootstrap_covers_the_truth_too() -> None:
    truth, _, evaluations = simulated("aime")
    intervals = [bootstrap_interval(means, resamples=400) for means in evaluations]
    assert 0.93 <= np.mean([low <= truth <= high for low, high in intervals]) <= 0.97


def test_the_interval_of_a_paired_difference_covers_the_truth_and_is_narrower_than_an_unpaired_one() -> None:
    """The baseline solves each problem with 0.9 times the chance of the other: a difference of a tenth of its accuracy."""
    rng = np.random.default_rng(2)
    chances = rng.beta(0.5, 0.7, size=(EVALUATIONS, 83))
    ours, theirs = rng.binomial(32, chances) / 32, rng.binomial(32, 0.9 * chances) / 32
    covered, narrower = 0, 0
    for a, b in zip(ours, theirs, strict=True):
        error = (a - b).std(ddof=1) / math.sqrt(83)
        half = student_95(82) * error
        covered += abs((a - b).mean() - 0.1 * 0.5 / 1.2) <= half
        narrower += error < 0.5 * math.hypot(a.std(ddof=1), b.std(ddof=1)) / math.sqrt(83)
    assert 0.93 <= covered / EVALUATIONS <= 0.97
    assert narrower == EVALUATIONS
    found = difference(ours[0].tolist(), theirs[0].tolist())
    assert found.standard_error == pytest.approx((ours[0] - theirs[0]).std(ddof=1) / math.sqrt(83))
    assert found.interval[0] < found.mean < found.interval[1]
    assert found.bootstrap == pytest.approx(found.interval, abs=0.01)


def test_a_difference_by_hand() -> None:
    """Changes 1, 1, -1, 0: mean 1/4, variance (2 * 9/16 + 25/16 + 1/16) / 3 = 11/12; t of 3 degrees is 3.1824."""
    found = difference([1, 1, 0, 0.5], [0, 0, 1, 0.5])
    assert (found.mean, found.better, found.worse, found.sign_test) == (0.25, 2, 1, 1.0)
    half = 3.182446 * math.sqrt(11 / 12 / 4)
    assert found.interval == (-1.0, 1.0) and 0.25 + half > 1  # no difference of accuracies is larger
    wide = difference([1, 1, 0, 0.5] * 8, [0, 0, 1, 0.5] * 8)
    half = student_95(31) * math.sqrt(32 * 11 / 16 / 31 / 32)
    assert wide.interval == pytest.approx((0.25 - half, 0.25 + half))
    with pytest.raises(ValueError):
        difference([1.0], [1.0, 0.0])


def test_students_quantile_is_that_of_the_tables() -> None:
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 5: 2.5706, 29: 2.0452, 30: 2.0423, 100: 1.9840, 1000: 1.9623, 100000: 1.9600}
    assert {freedom: round(student_95(freedom), 4) for freedom in table} == table
    assert student_95(1000) > student_95(1001) > student_95(1002)


def test_without_any_spread_the_interval_is_wilsons_and_no_point() -> None:
    """30 problems, none solved: t^2 / (29 + t^2)."""
    square = student_95(29) ** 2
    assert share([0.0] * 30, 32).interval == pytest.approx((0.0, square / (29 + square)))
    assert share([1.0] * 30, 1).interval == pytest.approx((29 / (29 + square), 1.0))
    low, high = share([0.5] * 30, 32).interval  # the problems agree: as good as 960 answers
    assert high - low == pytest.approx(2 * student_95(29) * 0.5 / math.sqrt(960 + square), rel=1e-6)
    assert share([2.0, 4.0], 1).interval == pytest.approx((3 - student_95(1), 3 + student_95(1)))  # scores beyond [0, 1]
    assert difference([3.0, 3.0], [0.0, 1.0]).interval == pytest.approx((2.5 - student_95(1) / 2, 2.5 + student_95(1) / 2))
    assert share([0.5], 32) == share([0.5], 1) and share([0.5], 1).interval is None


def test_of_single_answers_the_interval_is_wilsons() -> None:
    found = share([1.0] * 150 + [0.0] * 50, 1)
    t, n, p = student_95(199), 199, 0.75
    middle, half = p + t * t / (2 * n), t * math.sqrt(p * (1 - p) / n + (t / (2 * n)) ** 2)
    assert found.interval == pytest.approx(tuple((middle + sign * half) / (1 + t * t / n) for sign in (-1, 1)))
    assert found.bootstrap == pytest.approx(found.interval, abs=0.01)


def test_the_bootstrap_of_two_problems_by_hand() -> None:
    """The mean of 0 and 1 drawn twice is 0, 1/2 or 1; the outermost quantiles are 0 and 1."""
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_interval([0.3] * 5) == pytest.approx((0.3, 0.3))
    values = np.random.default_rng(0).random(4428).tolist()  # in several parts
    assert bootstrap_interval(values) == pytest.approx((0.5, 0.5), abs=0.02)
    assert bootstrap_interval(values) == bootstrap_interval(values)


@pytest.mark.parametrize(("right", "k"), [(0, 1), (1, 1), (1, 3), (3, 2), (4, 4), (6, 3), (3, 6)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples(right: int, k: int) -> None:
    samples = [True] * right + [False] * (6 - right)
    choices = [any(choice) for choice in combinations(samples, k)]
    assert pass_at_k(6, right, k) == pytest.approx(sum(choices) / len(choices))


def test_the_majority_vote_counts_only_given_answers() -> None:
    assert majority(["1", "2", "1"], [True, False, True]) == 1
    assert majority(["1", "2", "2"], [True, False, False]) == 0
    assert majority(["1", "2", "3", None], [True, False, False, False]) == pytest.approx(1 / 3)
    assert majority([None, None, "7"], [False, False, True]) == 1  # who gives no answer does not vote
    assert majority([None], [False]) == 0


@pytest.mark.parametrize(
    ("better", "worse", "p"), [(0, 0, 1.0), (5, 5, 1.0), (6, 0, 2 / 64), (8, 1, 2 * 10 / 512), (1, 8, 20 / 512)]
)
def test_the_sign_test(better: int, worse: int, p: float) -> None:
    assert sign_test(better, worse) == pytest.approx(p)
