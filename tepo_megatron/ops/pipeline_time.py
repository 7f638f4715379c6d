"""A model of the time that a pipeline takes for microbatches of unequal cost.

Legend: m microbatches, K rows of costs that are evaluated together, for example one per data-parallel rank. A cost is the time
of forward and backward on ONE stage, in any unit. All stages are assumed to take the same time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Index = NDArray[np.intp]

BACKWARD = 2 / 3  # share of a microbatch's time: two matrix products for each one of the forward pass
_TAPERS = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)  # relative costs of the outermost microbatch that `tapered` tries


@dataclass(frozen=True)
class Pipeline:
    """A pipeline. `chunks`: model chunks per stage (virtual pipelining). 1: not interleaved."""

    stages: int = 1
    chunks: int = 1

    @property
    def bubble(self) -> float:
        """Return the idle time of a stage, (stages - 1) / chunks microbatches of equal cost (arXiv 2104.04473, section 2.2)."""
        return (self.stages - 1) / self.chunks

    def makespans(self, costs_Km: Costs) -> Costs:
        """Return the time from the first forward to the last backward, [K], for costs [K, m].

        One stage: the sum of the costs. One chunk per stage: simulated as one-forward-one-backward, where the order of the
        microbatches matters. Several chunks: the estimate sum + bubble x largest cost, which is exact for equal costs.
        """
        if self.stages == 1:
            return costs_Km.sum(1)
        if self.chunks > 1:
            return costs_Km.sum(1) + self.bubble * costs_Km.max(1)
        return one_forward_one_backward(costs_Km, self.stages)


ALONE = Pipeline()


def one_forward_one_backward(costs_Km: Costs, stages: int, backward: float = BACKWARD) -> Costs:
    """Return the makespans [K] of the non-interleaved schedule that Megatron-Core runs (PipeDream-Flush, arXiv 2006.09503).

    Sending between stages is assumed to take no time. `costs_Km`: fp64 [K, m], the costs in the order in which the microbatches
    run.
    """
    work = np.concatenate((costs_Km.T - costs_Km.T * backward, costs_Km.T * backward))  # [2 m, K], forwards and backwards
    clock = np.zeros((stages, costs_Km.shape[0]))
    done_mK = np.zeros_like(costs_Km.T)  # when the stage before (forward) or after (backward) finished the microbatch
    for stage, step, i in _schedule(costs_Km.shape[1], stages):
        clock[stage] = done_mK[i] = np.maximum(clock[stage], done_mK[i]) + work[step]
    return clock.max(0)


def _schedule(microbatches: int, stages: int) -> Iterator[tuple[Index, Index, Index]]:
    """Yield the steps of all stages in the order in which they run: (stage, index into forwards and backwards, microbatch).

    Steps that are yielded together wait for none of each other: if all steps took equally long, they would run at once. Stage s
    makes stages - s forwards, then one backward and one forward in turn, then the backwards that are left.
    """
    stage, i = np.meshgrid(np.arange(stages), np.arange(microbatches), indexing="ij")
    forward = stage + np.where(i < stages - stage, i, 2 * i)
    backward = 2 * stages - 1 - stage + 2 * i
    times = np.concatenate((forward, backward), axis=1).ravel()
    order = times.argsort(kind="stable")
    stage, step = np.divmod(order, 2 * microbatches)
    cuts = np.flatnonzero(np.diff(times[order])) + 1
    return zip(*(np.split(x, cuts) for x in (stage, step, step % microbatches)), strict=True)


@lru_cache(maxsize=256)
def tapered(microbatches: int, stages: int) -> tuple[float, ...]:
    """Return the relative costs of microbatches that are smaller at the start and at the end: the best of a few linear tapers.

    While the pipeline fills, later stages wait for the first microbatches; while it drains, earlier stages wait for the last.
    The smaller these are, the shorter the bubble. All costs are equal if no taper is better.
    """
    width = min(stages, microbatches // 3)
    ends = [(first, last) for first in _TAPERS for last in _TAPERS]
    rows = np.ones((len(ends), microbatches))
    for row, (first, last) in zip(rows, ends, strict=True):
        for j in range(width):
            row[j] = first + (1 - first) * j / width
            row[-1 - j] = last + (1 - last) * j / width
    share = one_forward_one_backward(rows, stages) / rows.sum(1)
    best = int(np.flatnonzero(share <= share.min() + 1e-9)[-1])  # the least tapered of equally good ones
    return tuple(rows[best].tolist())


def small_at_the_ends(weights: Sequence[float]) -> list[int]:
    """Return the places 0 .. m - 1, from the smallest microbatch's to the largest's. Of equal weights, the ends come first."""
    last = len(weights) - 1
    return sorted(range(len(weights)), key=lambda j: (weights[j], min(j, last - j), -j))
