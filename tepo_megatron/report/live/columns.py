"""Follow a growing metrics.jsonl: read only what is new, and thin long runs for a page.

Letters in shapes: K keys, S steps.
"""

import math
import os
from pathlib import Path

import numpy as np

from tepo_megatron.observability.sinks import METRICS_FILE
from tepo_megatron.report.drawing import Curves
from tepo_megatron.utils.records import parse_lines, steps_of

BUCKETS = 500  # a longer run is thinned to two values for each of this many ranges of steps
_MEANS = "seconds/"  # these are stacked, so a range keeps their mean: the extremes of the parts have other sums than the whole
_CHUNK = 16 << 20  # bytes read at once
_TAIL = 64  # bytes before the place of the last read, which tell a file that was cut and grew again


class ColumnCurves(Curves):
    """Curves of a run by column. It reads like `Curves`, of which it holds no record.

    Args:
        steps: Steps, ascending, float64 _S.
        columns: Values by key, float64 _S; NaN where a step has none.
    """

    def __init__(self, steps: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        self.steps, self._columns = steps, columns

    def __getitem__(self, key: str) -> np.ndarray:
        return self._columns.get(key, np.full(len(self.steps), math.nan))

    def __contains__(self, key: str) -> bool:
        """Return whether some step has a value."""
        return key in self._columns and bool(np.isfinite(self._columns[key]).any())

    def named(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix` and have a value at some step."""
        return [key for key in self._columns if key.startswith(prefix) and key in self]

    def thinned(self, buckets: int = BUCKETS) -> "ColumnCurves":
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
        return ColumnCurves(steps, {key: _thinned(x, rows, width, key) for key, x in self._columns.items()})


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


class MetricsTail:
    """Reads metrics.jsonl of one run again and again. A call reads the complete lines that were added since the last one.

    A step that is recorded again replaces the former record. A file that was replaced or cut is read from its beginning.

    Attributes:
        unreadable: Number of complete lines that hold no step.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS_FILE
        self._forget()

    def _forget(self) -> None:
        self._offset, self._before, self._file = 0, b"", (0, 0)
        self._row: dict[int, int] = {}  # step -> row of the columns
        self._columns: dict[str, np.ndarray] = {}
        self.unreadable = 0

    def read(self) -> bool:
        """Read what is new; return whether anything has changed. A missing file holds no step."""
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            changed = bool(self._row)
            self._forget()
            return changed
        try:
            return self._read(file)
        finally:
            os.close(file)

    def _read(self, file: int) -> bool:
        status, changed = os.fstat(file), False
        same = self._file == (status.st_dev, status.st_ino) and status.st_size >= self._offset
        if not same or os.pread(file, len(self._before), self._offset - len(self._before)) != self._before:
            changed = bool(self._row)
            self._forget()
            self._file = status.st_dev, status.st_ino
        size = _CHUNK
        while data := os.pread(file, size, self._offset):
            complete = data[: data.rfind(b"\n") + 1]
            if not complete:
                if len(data) < size:  # the last line is being written
                    break
                size *= 2  # a line longer than the chunk; more than the whole file is never read
                continue
            self._add(complete)
            self._offset += len(complete)
            self._before = complete[-_TAIL:]
            changed, size = True, _CHUNK
        return changed

    def _add(self, data: bytes) -> None:
        found = steps_of(parse_lines(data))
        self.unreadable += sum(line.value is None for line in found.rest)
        for record in found.records:
            row = self._row.setdefault(int(record["step"]), len(self._row))
            for key, value in record.items():
                if key not in self._columns or row >= len(self._columns[key]):
                    self._grow(key, row)
                self._columns[key][row] = math.nan if value is None else float(value)
            for key in self._columns.keys() - record.keys():  # the step may have been recorded before, with more keys
                if row < len(self._columns[key]):
                    self._columns[key][row] = math.nan

    def _grow(self, key: str, row: int) -> None:
        former = self._columns.get(key, np.empty(0))
        self._columns[key] = np.full(max(1024, 2 * row), math.nan)
        self._columns[key][: len(former)] = former

    def curves(self) -> ColumnCurves:
        """Return all steps that were read, ascending."""
        steps = np.array(list(self._row), dtype=np.int64)
        order = np.argsort(steps)
        columns = {key: _whole(x, len(steps))[order] for key, x in self._columns.items()}
        return ColumnCurves(steps[order].astype(np.float64), columns)


def _whole(values: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` values; a column that no late step has is shorter, and gets NaN."""
    if len(values) >= count:
        return values[:count]
    return np.concatenate([values, np.full(count - len(values), math.nan)])
