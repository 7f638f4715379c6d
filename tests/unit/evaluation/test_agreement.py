"""Agreement with labels, against its definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tepo_megatron.evaluation.agreement import LabelledScores, agreement, auc, kappa, ranks, spearman


def test_figures_are_those_of_their_definitions() -> None:
    rng = np.random.default_rng(0)
    scores, true = rng.integers(0, 5, 60) / 4, rng.random(60) < 0.4
    pairs = list(itertools.product(scores[true], scores[~true]))
    assert auc(scores, true) == pytest.approx(sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs))
    said = scores >= 0.5
    table = np.array([[np.sum((said == a) & (true == b)) for b in (False, True)] for a in (False, True)]) / 60
    chance = float(table.sum(1) @ table.sum(0))
    assert kappa(said, true) == pytest.approx((np.trace(table) - chance) / (1 - chance))
    assert ranks([3.0, 1.0, 3.0, 2.0, 3.0]).tolist() == [4, 1, 4, 2, 4]
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([1.0, 8, 27, 64])) == pytest.approx(1.0)


def test_a_judge_that_likes_length_is_seen() -> None:
    labels, lengths = np.tile([0.0, 1.0], 20), np.arange(40.0)
    fair = agreement(LabelledScores(labels, lengths, np.array([labels, labels])))
    assert (fair.accuracy, fair.kappa, fair.auc, fair.length_bias, fair.repeatable) == (1, 1, 1, None, 1)
    lenient = agreement(LabelledScores(labels, lengths, np.array([lengths / 40])))
    assert lenient.length_bias is not None and lenient.length_bias > 0.4 and lenient.length_score == pytest.approx(1)
    assert lenient.repeatable is None and lenient.kappa is not None and abs(lenient.kappa) < 0.1


def test_what_was_not_judged_is_counted_and_left_out() -> None:
    labels, nan = np.array([1.0, 0.0, 1.0, 0.0]), math.nan
    found = agreement(LabelledScores(labels, np.ones(4), np.array([[1.0, 0.0, nan, nan], [0.5, 0.0, nan, 1.0]])))
    assert found.unjudged == 3 / 8 and found.accuracy == pytest.approx(2 / 3)
    assert found.repeatable == 0.5 and found.spread == pytest.approx(0.125)
    graded = agreement(LabelledScores(np.array([0.0, 0.5, 1.0]), np.ones(3), np.array([[0.1, 0.5, 0.9]])))
    assert graded.accuracy is None and graded.pearson == pytest.approx(1) and graded.offset == pytest.approx(0)
    nothing = agreement(LabelledScores(labels, np.ones(4), np.full((1, 4), nan)))
    assert nothing.unjudged == 1 and nothing.accuracy is None and nothing.error is None
