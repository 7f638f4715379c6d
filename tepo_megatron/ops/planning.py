"""Who computes which sequence in which microbatch.

Every rank holds the lengths of the whole batch and derives the same plan from them, so planning needs no collective. Costs are
in tokens: what takes as long as so many tokens without attention. Sequences that share a prompt are planned as one item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.balance import Items, assign_ranks, fill, fill_tightly
from tepo_megatron.ops.pipeline_time import ALONE, Costs, Pipeline, small_at_the_ends, tapered
from tepo_megatron.ops.shared_prompts import Families, cut, pieces_of

# [dp rank][microbatch] = the sequences in it
Plan = list[list[list[int]]]

# The length at which causal attention takes as many operations as all products with weights: parameters of a layer over the
# width of its queries, 233e6 / 3584 = 65e3 for Qwen2.5-7B.
ATTENTION_TOKENS = 60_000.0
MICROBATCH_TOKENS = 512  # what one more microbatch costs (launches, sends between stages): assumed, not measured


def sequence_costs(lengths: Sequence[int], attention_tokens: float = ATTENTION_TOKENS) -> list[float]:
    """L (1 + L / attention_tokens) of each length L: tokens, and what attention adds."""
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
    families: Families | None = None,
) -> Plan:
    """Assign sequences to data-parallel ranks and microbatches: plan[dp_rank][microbatch] = indices into `lengths`.

    Every rank gets the same number of microbatches, a multiple of `multiple_of` (pp under virtual pipelining); some may be
    empty. None holds more than `max_tokens` tokens, padding included, but for the padding of a sequence that is alone in it.
    As few as hold the sequences; in a pipeline, more of them where they shorten the bubble by more than they cost.

    families: their prompts are counted once in each microbatch. They are kept together, or cut into parts of at most half, a
    quarter, ... of a microbatch, or not kept together at all: whichever takes the least time by the cost model.

    Depends on the arguments alone, and of equally long sequences only on their order. Shortest first: a poorer plan, with other
    neighbours. Raises ValueError for a sequence longer than `max_tokens`.
    """
    longest = max(range(len(lengths)), key=lambda i: lengths[i], default=None)
    if longest is not None and lengths[longest] > max_tokens:
        raise ValueError(f"sequence {longest} has {lengths[longest]} tokens; max_tokens_per_microbatch is {max_tokens}")
    room = alignment.room(max_tokens)
    costs = _Costs(sequence_costs(lengths, attention_tokens), families, attention_tokens)

    def planned(groups: list[list[int]]) -> Plan:
        order = sorted(groups, key=lambda group: (costs.of(group) * (-1 if longest_first else 1), group))
        tokens = [min(room, sum(alignment.padded_one(p.tokens) for p in pieces_of(g, lengths, families))) for g in order]
        items = Items([costs.of(group) for group in order], tokens, room)
        plan = _plan_of_items(items, dp, multiple_of, pipeline, longest_first)
        return [[sorted(i for at in m for i in order[at]) for m in rank] for rank in plan]

    alone = [[i] for i in range(len(lengths))]
    if families is None:
        return planned(alone)
    plans = [planned(groups) for groups in (*cut(families, lengths, alignment, room), alone)]
    return min(plans, key=lambda p: float(pipeline.makespans(costs.of_plan(p)).max()) + MICROBATCH_TOKENS * len(p[0]))


def _plan_of_items(items: Items, dp: int, multiple_of: int, pipeline: Pipeline, longest_first: bool) -> Plan:
    """The same of items, which are named by their places."""
    wanted = max(1, -(-sum(items.tokens) // (dp * items.room)), _count_for_bubble(items.costs, dp, pipeline))
    count, plan = -(-wanted // multiple_of) * multiple_of, None
    while plan is None:  # ends at the latest when every item is alone
        plan = _plan_of(items, dp, count, pipeline, longest_first)
        count += multiple_of
    return plan


class _Costs:
    """Of sequences that are computed together: the sum of their own, less that of each prompt but once."""

    def __init__(self, costs: list[float], families: Families | None, attention_tokens: float) -> None:
        self._costs, self._families = costs, families
        self._prompts = [] if families is None else sequence_costs(families.lengths, attention_tokens)

    def of(self, indices: Sequence[int]) -> float:
        """Of one microbatch, or of a part of it."""
        cost = sum(self._costs[i] for i in indices)
        if self._families is None:
            return cost
        return cost - sum(self._prompts[m[0]] * (len(m) - 1) for m in self._families.members(indices))

    def of_plan(self, plan: Plan) -> Costs:
        """[dp, m]."""
        return np.array([[self.of(m) for m in rank] for rank in plan], dtype=np.float64)


def another_plan(plan: Callable[[int, bool], Plan], lengths: Sequence[int], dp: int, max_tokens: int) -> Plan | None:
    """A plan that packs the same sequences otherwise than plan(max_tokens, True) does; None where none is found.

    plan: `plan_microbatches` as a function of `max_tokens` and `longest_first`. The same microbatches on other ranks, or in
    another order, are not packed otherwise.
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
    families: Families | None = None,
) -> dict[str, float]:
    """What the plan computes and what it wastes, the latter by the cost model.

    `packing/computed_tokens`: of all ranks, padding included; `packing/shared_share`: of the sequences' tokens, those that need
    not be computed since they are another sequence's prompt too; `packing/padding_share`: of the computed tokens;
    `packing/balance`: mean time of the ranks over that of the slowest; `packing/bubble_share`: of the ranks' time, how much
    their stages wait for each other; `packing/microbatches`: of one rank. balance (1 - bubble_share) is the work over ranks x
    time of the slowest.
    """
    sizes = [[p.tokens for p in pieces_of(m, lengths, families)] for rank in plan for m in rank]
    tokens, padded = sum(map(sum, sizes)), sum(sum(alignment.padded(pieces or [1])) for pieces in sizes)
    costs_Km = _Costs(sequence_costs(lengths, attention_tokens), families, attention_tokens).of_plan(plan)
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


def _costs_of(plan: Plan, costs: Sequence[float]) -> Costs:
    """[dp, m]: the cost of each microbatch."""
    return np.array([[sum(costs[i] for i in m) for m in rank] for rank in plan], dtype=np.float64)


def _count_for_bubble(costs: Sequence[float], dp: int, pipeline: Pipeline) -> int:
    """The m that makes work x bubble / m + m x MICROBATCH_TOKENS least, but no more than there are sequences for a rank."""
    least = (sum(costs) / dp * pipeline.bubble / MICROBATCH_TOKENS) ** 0.5
    return min(round(least), len(costs) // dp)


def _plan_of(items: Items, dp: int, count: int, pipeline: Pipeline, longest_first: bool) -> Plan | None:
    """A plan of `count` microbatches for each rank; None where some rank's sequences do not fit into so many.

    Each rank takes the faster of equal and tapered microbatches; the tightest where those have no room.
    """
    equal = (1.0,) * count
    shapes = [equal, tapered(count, pipeline.stages)] if pipeline.stages > 1 and pipeline.chunks == 1 else [equal]
    assigned = assign_ranks(items.costs, dp, count, pipeline.bubble, longest_first)
    if any(sum(items.tokens[i] for i in mine) > count * items.room for mine in assigned):
        return None
    choices: list[Plan] = []  # of each rank
    for mine in assigned:
        filled = [(shape, fill(mine, items, shape)) for shape in shapes]
        if all(out is None for _, out in filled):
            filled = [(equal, fill_tightly(mine, items, count))]
        choices.append([_in_order(out, items, shape, pipeline) for shape, out in filled if out is not None])
        if not choices[-1]:
            return None
    times = iter(pipeline.makespans(_costs_of([option for found in choices for option in found], items.costs)).tolist())
    return [min((next(times), at, option) for at, option in enumerate(found))[2] for found in choices]


def _in_order(microbatches: list[list[int]], items: Items, shape: Sequence[float], pipeline: Pipeline) -> list[list[int]]:
    """As they run: in a pipeline those of small cost at the ends, else the largest first, so that memory runs out at once if
    it does."""
    by_cost = sorted(microbatches, key=lambda m: (sum(items.costs[i] for i in m), m))
    places = small_at_the_ends(shape) if pipeline.stages > 1 else list(range(len(shape)))[::-1]
    return [m for _, m in sorted(zip(places, by_cost, strict=True))]
