"""Plan the microbatches: which data-parallel rank computes which sequences in which microbatch.

Every rank holds the lengths of the whole batch and derives the same plan from them, so planning needs no collective. The unit
of cost is the time of one token without attention. Sequences that share a prompt are planned as one item.

The assignment, of sequences to ranks and of a rank's sequences to microbatches, is greedy: O(n log n). Sequences are assigned
in the order of their index, as a rule the longest first.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.packing import PrefixGroups, pieces_of, split_into_parts
from tepo_megatron.ops.pipeline_time import ALONE, Costs, Pipeline, small_at_the_ends, tapered

_HALVINGS = 24  # bisection steps in the search for the time of the slowest rank


@dataclass(frozen=True)
class PlanItems:
    """The sequences to assign."""

    costs: list[float]  # cost of each sequence, in any unit
    tokens: list[int]  # padded tokens of each sequence, at most `capacity`
    capacity: int  # capacity of a microbatch in tokens


def assign_ranks(costs: Sequence[float], dp: int, count: int, bubble: float, group_longest: bool) -> list[list[int]]:
    """Return the sequences of each rank, assigned so that the slowest rank takes little time.

    The model: a rank with total cost S, in `count` microbatches of which the largest costs M >= S / count, takes the time
    S + bubble x M.

    A long sequence makes M large, and with it the bubble; a second one on the same rank adds nothing to the bubble. With
    `group_longest`, sequences that cost more than a mean microbatch are therefore put together, on as few ranks as let all
    ranks end at the same time T. T is found by bisection, as in MULTIFIT (Coffman, Garey, Johnson 1978). Each of the other
    sequences goes to the rank that would end first (longest processing time first, Graham 1969). Returns indices into `costs`
    for each rank.
    """
    ranks: list[list[int]] = [[] for _ in range(dp)]
    work, largest = [0.0] * dp, [0.0] * dp
    place = 0
    for r, size in enumerate(_grouped(costs, dp, count, bubble) if group_longest and bubble else ()):
        ranks[r] = list(range(place, place + size))
        work[r], largest[r] = sum(costs[place : place + size]), costs[place]
        place += size
    heap = [(work[r] + bubble * max(largest[r], work[r] / count), r) for r in range(dp)]
    heapq.heapify(heap)
    for i in range(place, len(costs)):
        r = heap[0][1]
        ranks[r].append(i)
        work[r] += costs[i]
        largest[r] = max(largest[r], costs[i])
        heapq.heapreplace(heap, (work[r] + bubble * max(largest[r], work[r] / count), r))
    return ranks


def _grouped(costs: Sequence[float], dp: int, count: int, bubble: float) -> list[int]:
    """Return how many of the longest sequences to put on the first rank, on the second, and so on; [] if none are grouped."""
    total = sum(costs)
    long = [c for c in costs if c * dp * count > total]

    def groups(end: float) -> tuple[list[int], float]:
        """Return the number of long sequences on each rank that ends at `end`, and the cost that all ranks can take by then."""
        sizes: list[int] = []
        work = largest = capacity = 0.0
        for cost in long:
            if sizes and work + cost + bubble * largest <= end:
                sizes[-1] += 1
                work += cost
            else:
                sizes.append(1)
                work = largest = cost
                capacity += end - bubble * largest
        return sizes, capacity + (dp - len(sizes)) * end / (1 + bubble / count)

    low, high = total / dp, total / dp + (bubble + 1) * costs[0] if costs else 0.0
    for _ in range(_HALVINGS if long else 0):
        end = (low + high) / 2
        sizes, capacity = groups(end)
        low, high = (low, end) if len(sizes) <= dp and capacity >= total else (end, high)
    sizes, _ = groups(high)
    return sizes if len(sizes) <= dp else []


def fill(sequences: Sequence[int], items: PlanItems, weights: Sequence[float]) -> list[list[int]] | None:
    """Return the sequences of one rank in microbatches whose costs are proportional to `weights`; None if one does not fit.

    Each sequence goes to the microbatch that is furthest below its share of the cost, among those with enough free tokens.
    """
    share = sum(items.costs[i] for i in sequences) / sum(weights)
    lacking = [(-share * weight, m) for m, weight in enumerate(weights)]
    heapq.heapify(lacking)
    parked: list[tuple[int, float, int]] = []  # microbatches too full for the current length: (-capacity, -lack, m)
    out: list[list[int]] = [[] for _ in weights]
    capacity = [items.capacity] * len(weights)
    for i in sequences:
        tokens = items.tokens[i]
        while parked and -parked[0][0] >= tokens:
            heapq.heappush(lacking, heapq.heappop(parked)[1:])
        while lacking and capacity[lacking[0][1]] < tokens:
            lack, m = heapq.heappop(lacking)
            heapq.heappush(parked, (-capacity[m], lack, m))
        if not lacking:
            return None
        lack, m = lacking[0]
        out[m].append(i)
        capacity[m] -= tokens
        heapq.heapreplace(lacking, (lack + items.costs[i], m))
    return out


def fill_tightly(sequences: Sequence[int], items: PlanItems) -> list[list[int]]:
    """Return the sequences of one rank in microbatches by best fit, in as many as that takes.

    Each sequence goes to the fullest microbatch that can still hold it, or to a new one if there is none.
    """
    out: list[list[int]] = []
    capacities: list[tuple[int, int]] = []  # (free tokens, microbatch), ascending
    for i in sequences:
        at = bisect.bisect_left(capacities, (items.tokens[i], -1))
        if at == len(capacities):
            capacities.append((items.capacity, len(out)))
            out.append([])
        capacity, m = capacities.pop(at)
        out[m].append(i)
        bisect.insort(capacities, (capacity - items.tokens[i], m))
    return out


# [dp rank][microbatch] = indices of the sequences in it
Plan = list[list[list[int]]]

# The sequence length at which causal attention takes as many operations as all products with weights: parameters of a layer
# divided by the width of its queries, 233e6 / 3584 = 65e3 for Qwen2.5-7B.
ATTENTION_TOKENS = 60_000.0
MICROBATCH_TOKENS = 512  # cost of one more microbatch (launches, sends between stages): assumed, not measured


def sequence_costs(lengths: Sequence[int], attention_tokens: float = ATTENTION_TOKENS) -> list[float]:
    """Return the cost L (1 + L / attention_tokens) of each sequence: its tokens, and what attention adds."""
    return [n * (1 + n / attention_tokens) for n in lengths]


def plan_microbatches(
    lengths: Sequence[int],
    dp: int,
    max_tokens: int,
    alignment: Alignment,
    multiple_of: int = 1,
    longest_first: bool = True,
    pipeline: Pipeline = ALONE,
    attention_tokens: float = ATTENTION_TOKENS,
    prefix_groups: PrefixGroups | None = None,
) -> Plan:
    """Assign sequences to data-parallel ranks and microbatches.

    Every rank gets the same number of microbatches; some may be empty. There are as few as hold the sequences; in a pipeline
    there are more where they shorten the bubble by more than they cost. The plan depends on the arguments alone; equally long
    sequences are assigned in their order. `prefix_groups`: prefix groups, whose prompt is counted once in each microbatch. The
    members of a group are kept together, or split into parts of at most half, a quarter, ... of a microbatch, or planned one by
    one, whichever takes the least time by the cost model. None: no prompt is shared. Returns plan[dp_rank][microbatch], a list
    of indices into `lengths`. Raises ValueError if a sequence is longer than `max_tokens`.
    """
    longest = max(range(len(lengths)), key=lambda i: lengths[i], default=None)
    if longest is not None and lengths[longest] > max_tokens:
        raise ValueError(f"sequence {longest} has {lengths[longest]} tokens; max_tokens_per_microbatch is {max_tokens}")
    capacity = alignment.capacity(max_tokens)
    costs = _Costs(sequence_costs(lengths, attention_tokens), prefix_groups, attention_tokens)

    def planned(groups: list[list[int]]) -> Plan:
        order = sorted(groups, key=lambda group: (costs.of(group) * (-1 if longest_first else 1), group))
        tokens = [
            min(capacity, sum(alignment.padded_one(p.tokens) for p in pieces_of(g, lengths, prefix_groups))) for g in order
        ]
        items = PlanItems([costs.of(group) for group in order], tokens, capacity)
        plan = _plan_of_items(items, dp, multiple_of, pipeline, longest_first)
        return [[sorted(i for at in m for i in order[at]) for m in rank] for rank in plan]

    alone = [[i] for i in range(len(lengths))]
    if prefix_groups is None:
        return planned(alone)
    plans = [planned(groups) for groups in (*split_into_parts(prefix_groups, lengths, alignment, capacity), alone)]
    return min(plans, key=lambda p: float(pipeline.makespans(costs.of_plan(p)).max()) + MICROBATCH_TOKENS * len(p[0]))


def _plan_of_items(items: PlanItems, dp: int, multiple_of: int, pipeline: Pipeline, longest_first: bool) -> Plan:
    """Return the plan of items, each a sequence or a part of a prefix group, named by its index into `items`."""
    wanted = max(1, -(-sum(items.tokens) // (dp * items.capacity)), _count_for_bubble(items.costs, dp, pipeline))
    while True:  # it ends at the latest when every item has a microbatch of its own
        count = -(-wanted // multiple_of) * multiple_of
        plan, wanted = _plan_of(items, dp, count, pipeline, longest_first)
        if plan is not None:
            return plan


class _Costs:
    """The cost of sequences that share a microbatch: the sum of their own costs, with each shared prompt counted once."""

    def __init__(self, costs: list[float], prefix_groups: PrefixGroups | None, attention_tokens: float) -> None:
        self._costs, self._prefix_groups = costs, prefix_groups
        self._prompts = [] if prefix_groups is None else sequence_costs(prefix_groups.lengths, attention_tokens)

    def of(self, indices: Sequence[int]) -> float:
        cost = sum(self._costs[i] for i in indices)
        if self._prefix_groups is None:
            return cost
        return cost - sum(self._prompts[m[0]] * (len(m) - 1) for m in self._prefix_groups.members(indices))

    def of_plan(self, plan: Plan) -> Costs:
        """Return the cost of each microbatch, fp64 [dp, m]."""
        return np.array([[self.of(m) for m in rank] for rank in plan], dtype=np.float64)


def another_plan(plan: Callable[[int, bool], Plan], lengths: Sequence[int], dp: int, max_tokens: int) -> Plan | None:
    """Return a plan that puts the sequences into other microbatches than plan(max_tokens, True) does; None if none is found.

    The same microbatches on other ranks, or in another order, do not count as another plan.
    """

    def packed(plan: Plan) -> list[list[int]]:
        return sorted(m for rank in plan for m in rank if m)

    half = max(*lengths, min(max_tokens, sum(lengths) // dp) // 2)
    usual = packed(plan(max_tokens, True))
    others = (plan(tokens, first) for tokens, first in ((half, True), (max_tokens, False), (half, False)))
    return next((other for other in others if packed(other) != usual), None)


def plan_metrics(
    plan: Plan,
    lengths: Sequence[int],
    alignment: Alignment,
    pipeline: Pipeline = ALONE,
    attention_tokens: float = ATTENTION_TOKENS,
    prefix_groups: PrefixGroups | None = None,
) -> dict[str, float]:
    """Return what a plan computes and wastes. Times are those of the cost model.

    Args:
        prefix_groups: Prefix groups. None: no prompt is shared.
    Returns:
        `packing/computed_tokens`: tokens that all ranks compute, padding included.
        `packing/shared_share`: share of the sequences' tokens that are not computed, since another sequence has the same
            prompt.
        `packing/padding_share`: share of the computed tokens that are padding.
        `packing/balance`: mean time of the ranks divided by the time of the slowest.
        `packing/bubble_share`: share of the ranks' time in which pipeline stages wait for each other.
        `packing/microbatches`: number of microbatches of one rank.
        balance x (1 - bubble_share) is the total cost divided by (number of ranks x time of the slowest rank).
    """
    sizes = [[p.tokens for p in pieces_of(m, lengths, prefix_groups)] for rank in plan for m in rank]
    tokens, padded = sum(map(sum, sizes)), sum(sum(alignment.padded(pieces or [1])) for pieces in sizes)
    costs_Km = _Costs(sequence_costs(lengths, attention_tokens), prefix_groups, attention_tokens).of_plan(plan)
    times_K = pipeline.makespans(costs_Km)
    longest, total = float(times_K.max()), float(times_K.sum())
    return {
        "packing/computed_tokens": float(padded),
        "packing/shared_share": 1 - tokens / sum(lengths) if lengths else 0.0,
        "packing/padding_share": 1 - tokens / padded,
        "packing/balance": total / (len(plan) * longest) if total else 1.0,
        "packing/bubble_share": max(0.0, 1 - float(costs_Km.sum()) / total) if total else 0.0,
        "packing/microbatches": float(len(plan[0])),
    }


def _count_for_bubble(costs: Sequence[float], dp: int, pipeline: Pipeline) -> int:
    """Return the m that minimises work x bubble / m + m x MICROBATCH_TOKENS, at most the number of sequences per rank."""
    least = (sum(costs) / dp * pipeline.bubble / MICROBATCH_TOKENS) ** 0.5
    return min(round(least), len(costs) // dp)


def _plan_of(items: PlanItems, dp: int, count: int, pipeline: Pipeline, longest_first: bool) -> tuple[Plan | None, int]:
    """Return a plan of `count` microbatches for each rank, and `count`; or None, and how many microbatches its ranks need.

    Each rank takes the faster of equal and tapered
    microbatches. If its sequences fit into neither, it packs them by best fit.
    """
    equal = (1.0,) * count
    shapes = [equal, tapered(count, pipeline.stages)] if pipeline.stages > 1 and pipeline.chunks == 1 else [equal]
    choices: list[Plan] = []  # [rank][choice]
    needed = 0
    for mine in assign_ranks(items.costs, dp, count, pipeline.bubble, longest_first):
        filled = [(shape, out) for shape in shapes if (out := fill(mine, items, shape)) is not None]
        if not filled:
            tight = fill_tightly(mine, items)
            needed = max(needed, len(tight))
            filled = [(equal, tight + [[]] * (count - len(tight)))]
        choices.append([] if needed > count else [_in_order(out, items, shape, pipeline) for shape, out in filled])
    if needed > count:
        return None, needed
    options = [option for plans in choices for option in plans]
    times = iter(pipeline.makespans(_Costs(items.costs, None, ATTENTION_TOKENS).of_plan(options)).tolist())
    return [min((next(times), at, option) for at, option in enumerate(plans))[2] for plans in choices], count


def _in_order(microbatches: list[list[int]], items: PlanItems, shape: Sequence[float], pipeline: Pipeline) -> list[list[int]]:
    """Return the microbatches in the order in which they run: in a pipeline the cheap ones at both ends, else the largest
    first, so that a lack of memory shows at once.
    """
    by_cost = sorted(microbatches, key=lambda m: (sum(items.costs[i] for i in m), m))
    places = small_at_the_ends(shape) if pipeline.stages > 1 else list(range(len(shape)))[::-1]
    return [m for _, m in sorted(zip(places, by_cost, strict=True))]
