"""How long a pipeline takes for microbatches of unequal cost.

Legend: m microbatches, K rows of costs that are looked at side by side (the data-parallel ranks, say). A cost is the time of
forward and backward on ONE stage, in any unit; stages are taken to be alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]

BACKWARD = 2 / 3  # of a microbatch's time: two matrix products for each one of the forward pass
_TAPERS = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)


@dataclass(frozen=True)
class Pipeline:
    """stages: pp; chunks: model chunks of a stage (virtual pipelining; 1: none)."""

    stages: int = 1
    chunks: int = 1

    @property
    def bubble(self) -> float:
        """Idle time of a stage, in microbatches of equal cost: (stages - 1) / chunks (arXiv 2104.04473, section 2.2)."""
        return (self.stages - 1) / self.chunks

    def makespans(self, costs_Km: Costs) -> Costs:
        """[K] from [K, m]: from the first forward to the last backward.

        One chunk: by simulation of one-forward-one-backward, where the order of the microbatches matters. Several chunks: the
        estimate sum + bubble x largest cost (exact for equal costs). One stage: the sum.
        """
        if self.stages == 1:
            return costs_Km.sum(1)
        if self.chunks > 1:
            return costs_Km.sum(1) + self.bubble * costs_Km.max(1)
        return one_forward_one_backward(costs_Km, self.stages)


ALONE = Pipeline()


def one_forward_one_backward(costs_Km: Costs, stages: int, backward: float = BACKWARD) -> Costs:
    """[K] makespans of the non-interleaved schedule (PipeDream-Flush, arXiv 2006.09503), which Megatron-Core runs.

    costs_Km: fp64 [K, m], in the order in which they run; backward: its share of a cost. Sending takes no time.
    """
    backward_mK = costs_Km.T * backward
    forward_mK = costs_Km.T - backward_mK
    clock = np.zeros((stages, costs_Km.shape[0]))
    done_mK = np.zeros_like(forward_mK)  # when the stage before (forward) or after (backward) was done with a microbatch
    for stage, is_forward, i in _schedule(costs_Km.shape[1], stages):
        clock[stage] = np.maximum(clock[stage], done_mK[i]) + (forward_mK if is_forward else backward_mK)[i]
        done_mK[i] = clock[stage]
    return clock.max(0)


@lru_cache(maxsize=64)
def _schedule(microbatches: int, stages: int) -> tuple[tuple[int, bool, int], ...]:
    """(stage, is it a forward, microbatch) in an order in which nothing comes before what it waits for."""
    queues = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, microbatches)
        steady = [step for i in range(microbatches - ahead) for step in ((True, i + ahead), (False, i))]
        first, last = [(True, i) for i in range(ahead)], [(False, i) for i in range(microbatches - ahead, microbatches)]
        queues.append([*first, *steady, *last])
    at = [0] * stages
    out: list[tuple[int, bool, int]] = []
    seen: list[set[tuple[bool, int]]] = [set() for _ in range(stages)]
    while len(out) < 2 * microbatches * stages:
        for stage, queue in enumerate(queues):
            while at[stage] < len(queue):
                is_forward, i = step = queue[at[stage]]
                other = stage - 1 if is_forward else stage + 1
                if 0 <= other < stages and step not in seen[other]:
                    break
                seen[stage].add(step)
                out.append((stage, is_forward, i))
                at[stage] += 1
    return tuple(out)


@lru_cache(maxsize=256)
def tapered(microbatches: int, stages: int) -> tuple[float, ...]:
    """The costs, relative to the largest, of microbatches that start small and end small: the best linear tapers of a few.

    While the pipeline fills, later stages wait for the first microbatches, and while it drains, earlier ones for the last: the
    smaller those are, the shorter the bubble. Equal costs where nothing is better.
    """
    width = min(stages, microbatches // 3)
    ends = [(first, last) for first in _TAPERS for last in _TAPERS]
    rows = np.ones((len(ends), microbatches))
    for row, (first, last) in zip(rows, ends, strict=True):
        for j in range(width):
            row[j] = first + (1 - first) * j / width
            row[-1 - j] = last + (1 - last) * j / width
    share = one_forward_one_backward(rows, stages) / rows.sum(1)
    best = int(np.flatnonzero(share <= share.min() + 1e-9)[-1])  # of equals the least tapered
    return tuple(rows[best].tolist())


def small_at_the_ends(weights: Sequence[float]) -> list[int]:
    """Places 0 .. m - 1 from where the smallest microbatch belongs to where the largest does; of equal weights, ends first."""
    last = len(weights) - 1
    return sorted(range(len(weights)), key=lambda j: (weights[j], min(j, last - j), -j))
