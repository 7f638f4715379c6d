"""The statistics of an ablation equal numbers worked out by hand."""

import math

import pytest

from tepo_megatron.evaluation.statistics import Estimate, over_problems, paired_difference, standard_error
from tepo_megatron.report.ablation.ablate import steps_to_share_of_best

RUN = {0: {1: 1.0, 2: 0.0, 3: 0.5}, 1: {1: 1.0, 2: 0.5, 3: 0.0}}
BASELINE = {0: {1: 0.0, 2: 0.0, 3: 0.5}, 1: {1: 1.0, 2: 0.0, 3: 0.5}}


def test_accuracy_is_clustered_by_problem() -> None:
    """Problem means 1, 1/4, 1/4: mean 1/2, variance (1/4 + 1/16 + 1/16) / 2 = 3/16, error sqrt(3/16 / 3) = 1/4."""
    estimate = over_problems(RUN)
    assert (estimate.mean, estimate.standard_error) == (pytest.approx(0.5), pytest.approx(0.25))
    assert estimate.by_seed == {0: pytest.approx(0.5), 1: pytest.approx(0.5)}
    assert estimate.interval == (pytest.approx(0.5 - 1.959964 * 0.25), pytest.approx(0.5 + 1.959964 * 0.25))


def test_the_difference_is_paired_by_problem_and_seed() -> None:
    """Per problem 1/2, 1/4, -1/4 over both seeds: mean 1/6, variance (1/9 + 1/144 + 25/144) / 2 = 7/48."""
    difference = paired_difference(RUN, BASELINE)
    assert difference.mean == pytest.approx(1 / 6)
    assert difference.standard_error == pytest.approx(math.sqrt(7 / 48 / 3))
    assert difference.by_seed == {0: pytest.approx(1 / 3), 1: pytest.approx(0.0)}
    assert difference.covers_zero and not difference.seeds_agree_in_sign


def test_an_interval_over_seeds_needs_three_of_them() -> None:
    """Differences 0.1, 0.2 and 0.6 of the seeds: mean 0.3, variance 0.07, t(2) = 4.303. No problem is easier than another."""
    runs = {seed: {1: gain, 2: gain} for seed, gain in enumerate((0.1, 0.2, 0.6))}
    half = 4.302653 * math.sqrt(0.07 / 3)
    assert over_problems(runs).over_seeds == (pytest.approx(0.3 - half), pytest.approx(0.3 + half))
    assert over_problems({0: runs[0], 1: runs[1]}).over_seeds is None


def test_different_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="same problems"):
        over_problems({0: {1: 1.0}, 1: {2: 1.0}})
    with pytest.raises(ValueError, match="same problems"):
        paired_difference({0: {1: 1.0}}, {0: {2: 1.0}})
    with pytest.raises(ValueError, match="same problems"):
        over_problems({0: {}})


def test_one_problem_has_no_error_and_nothing_is_claimed_of_it() -> None:
    assert standard_error([0.3]) is None
    estimate = over_problems({0: {7: 1.0}})
    assert estimate == Estimate(1.0, None, {0: 1.0}) and estimate.interval is None and estimate.covers_zero


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1], 10),  # trailing means 0, 0.2, 0.4, 0.6, 0.8, 1, 1
        ([1, 1, 1, 1, 1, 0, 0, 0, 0, 0], 5),
        ([0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0], 5),
        ([0.5] * 5 + [0.8] * 5 + [0.5] * 5, 9),  # 0.9 * 0.8 = 0.72 <= 0.74, the mean of steps 5 to 9
        ([1, 1, 1, 1], None),
        ([0] * 8, None),
        ([1, 1, 1, math.nan, 1, 1], None),
    ],
)
def test_steps_to_most_of_its_own_best(values: list[float], step: int | None) -> None:
    assert steps_to_share_of_best(values) == step
