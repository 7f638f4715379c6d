"""Measure the rollout data path between inference servers and training ranks, at the sizes of a cluster, without a GPU.

    python -m benchmarks --only 15

`fake_pool.py` is a process that looks like many vLLM servers and answers at once. `engine_rows.py` puts the package's own
engine client and collector in front of it: what the rollout service computes. `rank_rows.py` measures both ends of the way to
the ranks, and what each rank does with the rollouts.

The figures are CPU seconds of the process that does the work, per million response tokens of a step of 67 million (128 x 16
samples of 6,000 tokens are 12 million), and the exponent of their growth from 1 million on: least squares of the logarithms.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.results import OURS, Measure, SuiteOptions, Target

SIZES = (1.0, 4.0, 12.0, 67.0)  # millions of tokens of a step
EXPONENT = 1.1
CPU_TARGETS = {"json": 0.5, "binary": 0.15}  # CPU seconds of the intake per million tokens


@dataclass(frozen=True)
class Point:
    """CPU seconds of the process that does the work, all its threads together, by millions of response tokens of the step."""

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


def growth(title: str, points: Sequence[Point], target: float | None = None) -> list[Measure]:
    """Return two rows of the table, of points in ascending order of size: the cost of the largest, and the exponent."""
    cost, limits = points[-1].cpu_seconds / points[-1].size, () if target is None else (Target(OURS, "<=", target),)
    exponent = (Target(OURS, "<=", EXPONENT),)
    return [
        Measure(15, title, "CPU s", cost, {}, limits, more={"points": [asdict(point) for point in points]}),
        Measure(15, f"{title}: exponent", "", power_law(points)[0], {}, exponent),
    ]


def measures(options: SuiteOptions, part: str) -> list[Measure]:
    """Measure one part of the path."""
    from benchmarks.controller import engine_rows, rank_rows
    from tepo_megatron.service.service import relax_garbage_collector

    relax_garbage_collector()  # as in the service
    sizes = (0.1, 0.2) if options.quick else SIZES
    if part in CPU_TARGETS:
        title = f"intake, {part} answers: receive, decode, check"
        return growth(title, engine_rows.intake(sizes, part), CPU_TARGETS[part])
    if part == "collect":
        return growth("intake and grading, in the process that collects", engine_rows.collect(sizes, "binary"))
    if part == "ranks":
        return growth("every rank: flatten, select, pack one of 8 shares", rank_rows.select_and_pack(sizes))
    points = rank_rows.hand_over(sizes)
    return [row for who, each in points.items() for row in growth(f"hand-over to the ranks: {who}", each)]
