"""Statistics of a run's learning curve, as pure functions. Those of accuracies are in `evaluation/statistics.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

WINDOW = 5  # steps
SHARE_OF_BEST = 0.9


def steps_to_share_of_best(values: Sequence[float]) -> int | None:
    """Return the first step (from 1) at which the mean of the last WINDOW values reaches SHARE_OF_BEST of its own maximum.

    None for fewer than WINDOW steps, if a value is missing (NaN), or if the mean never exceeds 0. `values` has one value per
    step of a single run.
    """
    if any(math.isnan(value) for value in values):
        return None
    trailing = [statistics.fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]
    best = max(trailing, default=0.0)
    if best <= 0:
        return None
    return WINDOW + next(i for i, mean in enumerate(trailing) if mean >= SHARE_OF_BEST * best)


def mean_of_last(values: Sequence[float]) -> float | None:
    """Return the mean of those of the last WINDOW values that are not NaN; None if all of them are."""
    known = [value for value in values[-WINDOW:] if not math.isnan(value)]
    return statistics.fmean(known) if known else None
