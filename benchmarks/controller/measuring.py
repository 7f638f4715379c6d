"""CPU seconds of this process, and the exponent of their growth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """One measurement of a part.

    Attributes:
        size: Response tokens of the step, in millions.
        cpu_seconds: CPU seconds of the process that does the work, all its threads together.
    """

    size: float
    cpu_seconds: float


def fastest(size: float, work: Callable[[], Any], calls: int = 3) -> Point:
    """Measure single calls, and return the fastest."""
    found = []
    for _ in range(calls):
        start = time.process_time()
        kept = work()
        found.append(time.process_time() - start)
        del kept  # not timed
    return Point(size, min(found))


def power_law(points: Sequence[Point]) -> tuple[float, float]:
    """Return (exponent, factor) of CPU seconds = factor x size^exponent: least squares of the logarithms."""
    x = [math.log(point.size) for point in points]
    y = [math.log(max(point.cpu_seconds, 1e-6)) for point in points]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    exponent = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    return exponent, math.exp(mean_y - exponent * mean_x)
