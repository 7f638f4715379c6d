"""Agreement of a judge with labels: pure functions of scores. Undefined figures are None, such as those of one class."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

THRESHOLD = 0.5  # from which a score or a label counts as positive
Values = NDArray[np.float64]


@dataclass(frozen=True)
class LabelledScores:
    """The scores of N responses. All arrays are in the same order.

    Attributes:
        labels_N: Labels, 0 to 1.
        lengths_N: Lengths of the responses in characters.
        scores_RN: Scores, by repeat; nan where the judge gave none.
    """

    labels_N: Values
    lengths_N: Values
    scores_RN: Values


@dataclass(frozen=True)
class Agreement:
    """The agreement of a judge with labels. All figures but the first three are of responses with a score in some repeat.

    Attributes:
        responses, repeats: Number of responses, and of seeds for each.
        unjudged: Share of questions without a readable verdict.
        accuracy: Share of responses on the same side of 0.5 as their label; for binary labels only, like the next two.
        kappa: Cohen's kappa of the same decisions: 1 agrees always, 0 as often as by chance.
        auc: Probability that a positive response scores higher than a negative one; ties count half.
        pearson, spearman: Linear and rank correlation of scores and labels.
        error: Mean absolute difference of score and label.
        offset: Mean score minus mean label; positive: the judge is lenient.
        length_score, length_label: Rank correlations of the response's length with score and label.
        length_bias: Rank correlation of the response's length with score minus label: 0 for a judge that length does not move.
        repeatable: Share of responses whose scores are equal in all repeats; None for one repeat.
        spread: Mean standard deviation of the scores of one response over the repeats; None for one repeat.
    """

    responses: int
    repeats: int
    unjudged: float
    accuracy: float | None
    kappa: float | None
    auc: float | None
    pearson: float | None
    spearman: float | None
    error: float | None
    offset: float | None
    length_score: float | None
    length_label: float | None
    length_bias: float | None
    repeatable: float | None
    spread: float | None

    def figures(self) -> Mapping[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def agreement(found: LabelledScores) -> Agreement:
    """Return the agreement of the mean score over the repeats with the labels."""
    scores_RN, given_RN = found.scores_RN, ~np.isnan(found.scores_RN)
    some_N, all_N = given_RN.any(0), given_RN.all(0)
    scores = np.array([np.mean(column[~np.isnan(column)]) for column in scores_RN.T[some_N]])
    labels, lengths = found.labels_N[some_N], found.lengths_N[some_N]
    binary = scores.size > 0 and bool(np.isin(found.labels_N, (0.0, 1.0)).all())
    said, true = scores >= THRESHOLD, labels >= THRESHOLD
    repeated = scores_RN.shape[0] > 1 and bool(all_N.any())
    return Agreement(
        responses=scores_RN.shape[1],
        repeats=scores_RN.shape[0],
        unjudged=float(1 - given_RN.mean()),
        accuracy=float(np.mean(said == true)) if binary else None,
        kappa=kappa(said, true) if binary else None,
        auc=auc(scores, true) if binary else None,
        pearson=pearson(scores, labels),
        spearman=spearman(scores, labels),
        error=float(np.mean(np.abs(scores - labels))) if scores.size else None,
        offset=float(np.mean(scores) - np.mean(labels)) if scores.size else None,
        length_score=spearman(lengths, scores),
        length_label=spearman(lengths, labels),
        length_bias=spearman(lengths, scores - labels),
        repeatable=float(np.mean(np.ptp(scores_RN[:, all_N], 0) == 0)) if repeated else None,
        spread=float(np.mean(np.std(scores_RN[:, all_N], 0))) if repeated else None,
    )


def kappa(said_N: NDArray[np.bool_], true_N: NDArray[np.bool_]) -> float | None:
    """Return Cohen's kappa (Cohen, 1960) of two binary decisions; None if chance alone would always agree.

    Args:
        said_N, true_N: The decisions.
    """
    observed, said, true = float(np.mean(said_N == true_N)), float(np.mean(said_N)), float(np.mean(true_N))
    by_chance = said * true + (1 - said) * (1 - true)
    return None if by_chance == 1 else (observed - by_chance) / (1 - by_chance)


def auc(scores_N: Values, true_N: NDArray[np.bool_]) -> float | None:
    """Return the area under the ROC curve, by ranks (Mann and Whitney, 1947); None with one class.

    Args:
        scores_N: The scores.
        true_N: The classes.
    """
    positive = int(true_N.sum())
    negative = true_N.size - positive
    if not positive or not negative:
        return None
    wins = float(ranks(scores_N)[true_N].sum()) - positive * (positive + 1) / 2
    return wins / (positive * negative)


def pearson(a_N: Values, b_N: Values) -> float | None:
    """Return the linear correlation; None if one side is constant, or there are fewer than two values.

    Args:
        a_N, b_N: The values.
    """
    if a_N.size < 2 or np.ptp(a_N) == 0 or np.ptp(b_N) == 0:
        return None
    return float(np.corrcoef(a_N, b_N)[0, 1])


def spearman(a_N: Values, b_N: Values) -> float | None:
    """Return the rank correlation; None as in `pearson`.

    Args:
        a_N, b_N: The values.
    """
    return pearson(ranks(a_N), ranks(b_N))


def ranks(values_N: Values | Sequence[float]) -> Values:
    """Return the ranks from 1; equal values share the mean of theirs."""
    _, place_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Values = (last - counts + 1 + last) / 2
    return mean[place_N]
