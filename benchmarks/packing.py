"""Measure the share of the mesh's time that a plan of microbatches keeps busy, ours next to two others.

    python -m benchmarks --only 6

512 sequences of lognormal length (mean 6,100 tokens before the cap, sigma 0.9, cap 32,768), 32,768 tokens per microbatch. A
sequence of L tokens costs L (1 + L / 60,000). Efficiency: work / (ranks x time of the slowest rank). The time is that of
one-forward-one-backward with backward twice as long as forward ("train"), or of the forward pass alone ("forward").

The others, written by us from the description in their sources:
  longest first   each sequence, the longest first, to the rank with the fewest tokens, there to the first microbatch that fits.
  slime           THUDM/slime at 04e6743, slime/utils/dp_schedule.py and seqlen_balancing.py, with `balance_data`: first fit in
                  the order of arrival over all ranks; the fullest bin halved until their number is a multiple of dp; bins to
                  ranks, equally many each, by the largest differencing method (Karmarkar and Karp 1982) on their cost.
"""

import heapq
import math
import random
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.results import OURS, Measure, SuiteOptions, Target
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.pipeline_time import Pipeline
from tepo_megatron.ops.planning import Plan, plan_metrics, plan_microbatches, sequence_costs

MEAN, SIGMA, CAP, MICROBATCH_TOKENS = 6100, 0.9, 32768, 32768
MESHES = ((16, 2), (16, 1), (16, 4), (4, 2))  # dp, pp; the first is the one with a target
TARGET = 0.90
SEEDS = 16
PADDED = 8  # sequences per rectangle
PADDING = Alignment(cp=2, total=2)  # as with CP 2, TP 2 and sequence parallelism
Planner = Callable[[Sequence[int], int, int], Plan]  # (lengths, dp, pp)


def lognormal(seed: int, count: int = 512) -> list[int]:
    """Return lengths of sequences in tokens."""
    draw = random.Random(seed)
    return [min(CAP, max(1, round(draw.lognormvariate(math.log(MEAN) - SIGMA**2 / 2, SIGMA)))) for _ in range(count)]


def ours(lengths: Sequence[int], dp: int, pp: int) -> Plan:
    """Return the plan of `plan_microbatches`."""
    return plan_microbatches(lengths, dp, MICROBATCH_TOKENS, Alignment(), pipeline=Pipeline(pp))


def longest_first(lengths: Sequence[int], dp: int, pp: int) -> Plan:
    """Return the plan of `longest first`, as the top of this file defines it."""
    loads, plan = [0] * dp, [[] for _ in range(dp)]  # type: tuple[list[int], Plan]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        loads[rank] += lengths[i]
        first_fit(plan[rank], i, lengths)
    return even(plan)


def slime(lengths: Sequence[int], dp: int, pp: int) -> Plan:
    """Return the plan of `slime`, as the top of this file describes it."""
    bins: list[list[int]] = []
    for i in range(len(lengths)):
        first_fit(bins, i, lengths)
    while len(bins) % dp:
        halves: list[list[int]] = [[], []]
        fullest = max((b for b in bins if len(b) > 1), key=lambda b: sum(lengths[i] for i in b))
        for i in sorted(fullest, key=lambda i: -lengths[i]):
            min(halves, key=lambda half: sum(lengths[j] for j in half)).append(i)
        bins[bins.index(fullest)] = halves[0]
        bins.append(halves[1])
    costs = sequence_costs(lengths)
    return [[bins[b] for b in sorted(rank)] for rank in largest_differencing([sum(costs[i] for i in b) for b in bins], dp)]


def first_fit(bins: list[list[int]], i: int, lengths: Sequence[int]) -> None:
    """Put sequence i into the first bin that has enough free tokens, or into a new bin."""
    found = next((b for b in bins if sum(lengths[j] for j in b) + lengths[i] <= MICROBATCH_TOKENS), None)
    if found is None:
        bins.append(found := [])
    found.append(i)


def largest_differencing(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Return sets of equally many indices with similar sums, by the largest differencing method.

    Sorted runs of `parts` indices are the start. The two most uneven sets are merged, large with small, until one is left.
    """
    order = sorted(range(len(costs)), key=lambda i: costs[i])
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for start in range(0, len(order), parts):
        run = [(costs[i], [i]) for i in order[start : start + parts]]
        heapq.heappush(heap, (run[0][0] - run[-1][0], start, run))
    while len(heap) > 1:
        (_, start, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        run = sorted((x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True))
        heapq.heappush(heap, (run[0][0] - run[-1][0], start, run))
    return [places for _, places in heap[0][2]]


def even(plan: Plan) -> Plan:
    """Pad every rank with empty microbatches to the largest number of any rank."""
    most = max(len(rank) for rank in plan)
    return [[*rank, *([] for _ in range(most - len(rank)))] for rank in plan]


KINDS = {
    "train": "efficiency of training, mean of the seeds",
    "train_worst": "efficiency of training, worst seed",
    "forward": "efficiency of a forward pass, mean of the seeds",
    "forward_worst": "efficiency of a forward pass, worst seed",
}
PLANNERS: dict[str, Planner] = {"ours": ours, "slime": slime, "longest first": longest_first}


def efficiency(plan: Plan, lengths: Sequence[int], pp: int) -> dict[str, float]:
    """Return `train` and `forward` as the top of this file defines them, and the number of microbatches of a rank."""
    found = plan_metrics(plan, lengths, Alignment(), Pipeline(pp))
    costs = sequence_costs(lengths)
    costs_Km = np.array([[sum(costs[i] for i in m) for m in rank] for rank in plan])
    forward = costs_Km.sum(1) + (pp - 1) * costs_Km.max(1)  # equal stages: any order (Pinedo, proportionate flow shop)
    return {
        "train": found["packing/balance"] * (1 - found["packing/bubble_share"]),
        "forward": float(costs_Km.sum() / len(plan) / forward.max()),
        "microbatches": found["packing/microbatches"],
    }


def measure(dp: int, pp: int, seeds: int, planners: Sequence[str] = tuple(PLANNERS)) -> dict[str, dict[str, float]]:
    """Return, for each planner, mean and worst efficiencies over the seeds, and the mean number of microbatches."""
    out = {}
    for name in planners:
        planner = PLANNERS[name]
        runs = [efficiency(planner(lengths, dp, pp), lengths, pp) for lengths in map(lognormal, range(seeds))]
        train, forward = ([run[kind] for run in runs] for kind in ("train", "forward"))
        out[name] = {
            "train": statistics.fmean(train), "train_worst": min(train),
            "forward": statistics.fmean(forward), "forward_worst": min(forward),
            "microbatches": statistics.fmean(run["microbatches"] for run in runs),
        }  # fmt: skip
    return out


def measures(options: SuiteOptions, planners: Sequence[str] = tuple(PLANNERS)) -> list[Measure]:
    """Return the efficiencies on every mesh and the padding's share of the computed tokens. All are counts."""
    out, seeds = [], 2 if options.quick else SEEDS
    for dp, pp in MESHES:
        found = measure(dp, pp, seeds, planners)
        for key, what in KINDS.items():
            values = {name: row[key] for name, row in found.items()}
            targets = (Target(OURS, ">=", TARGET),) if (dp, pp) == MESHES[0] and key != "forward_worst" else ()
            out.append(_measure(f"{what}, DP{dp} PP{pp}", values, targets, higher_is_better=True))
    lengths = [lognormal(seed) for seed in range(seeds)]
    return [*out, _measure("padding, share of the computed tokens, CP2 TP2", padding_share(lengths), ())]


def _measure(what: str, values: dict[str, float], targets: tuple[Target, ...], higher_is_better: bool = False) -> Measure:
    peers = {name: value for name, value in values.items() if name != OURS}
    return Measure(6, what, "", values[OURS], peers, targets, deterministic=True, higher_is_better=higher_is_better)


def padding_share(batches: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the mean share of padding in our plans for DP16, and in rectangles of PADDED sequences in order of arrival."""
    packed = [
        plan_metrics(plan_microbatches(b, 16, MICROBATCH_TOKENS, PADDING), b, PADDING)["packing/padding_share"] for b in batches
    ]
    rectangles = [
        1 - sum(b) / sum(len(r) * max(r) for r in (b[i : i + PADDED] for i in range(0, len(b), PADDED))) for b in batches
    ]
    return {OURS: statistics.fmean(packed), f"rectangles of {PADDED}": statistics.fmean(rectangles)}
