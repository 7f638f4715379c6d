"""Follow a growing metrics.jsonl: read only what is new."""

import math
import os
from pathlib import Path

import numpy as np

from tepo_megatron.observability.sinks import METRICS_FILE
from tepo_megatron.report.curves import Curves
from tepo_megatron.utils.records import parse_lines, steps_of

_CHUNK = 16 << 20  # bytes read at once
_TAIL = 64  # bytes before the place of the last read, which tell a file that was cut and grew again


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

    def curves(self) -> Curves:
        """Return all steps that were read, ascending."""
        steps = np.array(list(self._row), dtype=np.int64)
        order = np.argsort(steps)
        columns = {key: _whole(x, len(steps))[order] for key, x in self._columns.items()}
        return Curves(steps[order].astype(np.float64), columns)


def _whole(values: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` values; a column that no late step has is shorter, and gets NaN."""
    if len(values) >= count:
        return values[:count]
    return np.concatenate([values, np.full(count - len(values), math.nan)])
