"""The predictions of `benchmarks.mechanisms`, as data, and how each is judged.

They were written down, and committed, before the run of record. Those of origin `audit` come from an earlier experiment with
the same task, other random numbers and other code. Those of origin `pilot` were chosen after a run with seeds 100 to 103, which
the run of record does not use.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tepo_megatron.evaluation.statistics import standard_error, student_95

Runs = Mapping[str, Mapping[str, Mapping[str, Any]]]  # regime -> arm -> {"measures": name -> values by seed, "curves": ...}


@dataclass(frozen=True)
class Prediction:
    """The claim that one figure is larger than another, times a factor.

    Attributes:
        claim: The claim in words.
        regime: Regime in which both were trained.
        larger, smaller: Arm and measure.
        factor: Factor of the smaller one.
        origin: Where the prediction comes from.
    """

    claim: str
    regime: str
    larger: tuple[str, str]
    smaller: tuple[str, str]
    factor: float = 1.0
    origin: str = "audit"


PREDICTIONS: tuple[Prediction, ...] = ()


def judge(prediction: Prediction, runs: Runs) -> dict[str, Any]:
    """Return the prediction with the means of both sides, the effect larger - factor x smaller, its interval and the verdict.

    The effect is paired by seed. The interval is at 95 %, over seeds, by Student's t. `holds`: it is above 0; `fails`: it is
    below 0; `undecided`: it contains 0.

    Args:
        prediction: The prediction.
        runs: Regime -> arm -> measures by seed.

    Raises:
        ValueError: There are fewer than two seeds, so that there is no interval.
    """
    sides = [runs[prediction.regime][arm]["measures"][measure] for arm, measure in (prediction.larger, prediction.smaller)]
    effects = [a - prediction.factor * b for a, b in zip(*sides, strict=True)]
    if (error := standard_error(effects)) is None:
        raise ValueError("an interval over seeds needs at least two seeds; give more --seeds")
    mean, half = statistics.fmean(effects), student_95(len(effects) - 1) * error
    verdict = "holds" if mean - half > 0 else "fails" if mean + half < 0 else "undecided"
    means = dict(zip(("larger_mean", "smaller_mean"), map(statistics.fmean, sides), strict=True))
    return asdict(prediction) | means | {"effect": mean, "interval": [mean - half, mean + half], "verdict": verdict}
