"""Measuring tools of the data path: CPU seconds of this process, peak memory, and the exponent of growth."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")

SAMPLE_SECONDS = 0.01
LEAST_SECONDS = 0.1  # of CPU time; shorter work is repeated
MIB = 2**20


@dataclass(frozen=True)
class Point:
    """One measurement of a part.

    Attributes:
        size: Response tokens of the step, in millions.
        cpu_seconds: CPU seconds of the process that does the work, all its threads together.
        peak_mib: Peak resident memory above that at the start, in MiB. None: not measured.
    """

    size: float
    cpu_seconds: float
    peak_mib: float | None = None


class PeakMemory:
    """Peak of the resident memory inside the block, above that at its start: use it as a context manager.

    Attributes:
        mib: The result in MiB, after the block.
    """

    def __enter__(self) -> PeakMemory:
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc only: memory that was freed but kept would hide a new peak
            ctypes.CDLL(None).malloc_trim(0)
        self.mib, self._over = 0.0, threading.Event()
        self._start = self._top = resident_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()
        self.mib = (max(self._top, resident_bytes()) - self._start) / MIB

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self._top = max(self._top, resident_bytes())


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fastest(size: float, work: Callable[[], Any], calls: int = 3) -> Point:
    """Measure single calls with their peak memory, and return the fastest."""
    found = []
    for _ in range(calls):
        with PeakMemory() as memory:
            start = time.process_time()
            kept = work()  # it counts as long as a caller would hold it
            seconds = time.process_time() - start
        del kept
        found.append(Point(size, seconds, memory.mib))
    return min(found, key=lambda point: point.cpu_seconds)


def repeated(size: float, work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> Point:
    """Measure the mean of calls of at least LEAST_SECONDS together, without memory."""
    total, calls = 0.0, 0
    while total < LEAST_SECONDS:
        before()
        start = time.process_time()
        work()
        total, calls = total + time.process_time() - start, calls + 1
    return Point(size, total / calls)


def power_law(points: Sequence[Point]) -> tuple[float, float]:
    """Return (exponent, factor) of CPU seconds = factor x size^exponent: least squares of the logarithms."""
    x = [math.log(point.size) for point in points]
    y = [math.log(max(point.cpu_seconds, 1e-6)) for point in points]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    exponent = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return exponent, math.exp(mean_y - exponent * mean_x)
