"""The records of a run as one array per key, and how a long run is thinned for the live page.

Letters in shapes: S steps.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tepo_megatron.monitor.sinks import Value

BUCKETS = 500  # a longer run is thinned to two values for each of this many ranges of steps
_MEANS = "seconds/"  # these are stacked, so a range keeps their mean: the extremes of the parts have other sums than the whole


class Curves:
    """Values of a run by key, one per step; NaN (a gap in the line) at a step without a value.

    Args:
        steps: Steps, ascending, float64 _S.
        columns: Values by key, float64 _S.
    """

    def __init__(self, steps: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        self.steps, self._columns = steps, columns

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Value]]) -> "Curves":
        """Return the curves of records, one per step, ascending."""
        keys = dict.fromkeys(key for record in records for key in record)
        columns = {key: np.array([math.nan if (v := r.get(key)) is None else float(v) for r in records]) for key in keys}
        return cls(columns.get("step", np.empty(0)), columns)

    def __getitem__(self, key: str) -> np.ndarray:
        return self._columns.get(key, np.full(len(self.steps), math.nan))

    def __contains__(self, key: str) -> bool:
        return key in self._columns and bool(np.isfinite(self._columns[key]).any())

    def named(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix` and have a value at some step."""
        return [key for key in self._columns if key.startswith(prefix) and key in self]

    def between(self, key: str) -> np.ndarray:
        """Return a quantity that only some steps measure, interpolated linearly between them; all NaN if no step has it."""
        values = self[key]
        known = np.isfinite(values)
        return np.interp(self.steps, self.steps[known], values[known]) if known.any() else values

    def thinned(self, buckets: int = BUCKETS) -> "Curves":
        """Return at most 2 * `buckets` values of each key: the least and the greatest of each range, in the order they came.

        Each pair is drawn at the first and the last step of its range. A short run is returned unchanged.
        """
        count = len(self.steps)
        if count <= 2 * buckets:
            return self
        width = math.ceil(count / buckets)
        rows = math.ceil(count / width)
        ends = np.minimum(np.arange(1, rows + 1) * width, count) - 1
        steps = np.stack([self.steps[np.arange(rows) * width], self.steps[ends]], axis=1).reshape(-1)
        return Curves(steps, {key: _thinned(x, rows, width, key) for key, x in self._columns.items()})


def _thinned(values: np.ndarray, rows: int, width: int, key: str) -> np.ndarray:
    padded = np.full(rows * width, math.nan)
    padded[: len(values)] = values
    table = padded.reshape(rows, width)
    known = np.isfinite(table)
    some = known.any(axis=1)
    if key.startswith(_MEANS):
        mean = np.where(known, table, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
        pair = np.stack([mean, mean], axis=1)
    else:
        low = np.where(known, table, math.inf).argmin(axis=1)
        high = np.where(known, table, -math.inf).argmax(axis=1)
        row = np.arange(rows)
        pair = np.stack([table[row, np.minimum(low, high)], table[row, np.maximum(low, high)]], axis=1)
    pair[~some] = math.nan
    return pair.reshape(-1)
