"""Plan the microbatches: which data-parallel rank computes which sequences in which microbatch.

Every rank holds the lengths of the whole batch and derives the same plan from them, so planning needs no collective. The unit
of cost is the time of one token without attention. Sequences that share a prompt are planned as one item.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.balance import PlanItems, assign_ranks, fill, fill_tightly
from tepo_megatron.ops.pipeline_time import ALONE, Costs, Pipeline, small_at_the_ends, tapered
from tepo_megatron.ops.shared_prompts import PrefixGroups, pieces_of, split_into_parts

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
    options = [option for found in choices for option in found]
    times = iter(pipeline.makespans(_Costs(items.costs, None, ATTENTION_TOKENS).of_plan(options)).tolist())
    return [min((next(times), at, option) for at, option in enumerate(found))[2] for found in choices], count


def _in_order(microbatches: list[list[int]], items: PlanItems, shape: Sequence[float], pipeline: Pipeline) -> list[list[int]]:
    """Return the microbatches in the order in which they run: in a pipeline the cheap ones at both ends, else the largest
    first, so that a lack of memory shows at once.
    """
    by_cost = sorted(microbatches, key=lambda m: (sum(items.costs[i] for i in m), m))
    places = small_at_the_ends(shape) if pipeline.stages > 1 else list(range(len(shape)))[::-1]
    return [m for _, m in sorted(zip(places, by_cost, strict=True))]
