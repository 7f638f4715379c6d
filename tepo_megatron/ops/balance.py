"""Sequences over data-parallel ranks and microbatches by cost: two greedy assignments, O(n log n).

Places are indices into `Items`, whose order (the longest first, as a rule) is the order in which sequences are assigned.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

_HALVINGS = 24  # of the search for the time of the slowest rank


@dataclass(frozen=True)
class Items:
    """cost and padded tokens of each sequence, and the tokens that a microbatch may hold; no sequence has more than those."""

    costs: list[float]
    tokens: list[int]
    room: int


def assign_ranks(costs: Sequence[float], dp: int, count: int, bubble: float, group_longest: bool) -> list[list[int]]:
    """The sequences of each of `dp` ranks, so that the slowest is fast: a rank with work S, in `count` microbatches of which
    the largest costs M >= S / count, takes S + bubble x M.

    A long sequence makes M, and so the bubble, large; a second one on the same rank adds nothing to it. With `group_longest`,
    those that cost more than a mean microbatch are therefore put together, on as few ranks as let all ranks end at the same
    time T; T is found by bisection, as in MULTIFIT (Coffman, Garey, Johnson 1978). The others go to the rank that would end
    first (longest processing time first, Graham 1969).
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
    """How many of the longest sequences, in turn, to put on the first rank, the second, and so on; [] for nothing to group."""
    total = sum(costs)
    long = [c for c in costs if c * dp * count > total]

    def groups(end: float) -> tuple[list[int], float]:
        """Ranks of long sequences that end in time, and the work that all ranks together can take until then."""
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


def fill(sequences: Sequence[int], items: Items, weights: Sequence[float]) -> list[list[int]] | None:
    """The sequences of one rank in microbatches whose costs are as `weights`; None where one finds no room.

    Each goes to the microbatch that lacks most of its share, of those with room.
    """
    share = sum(items.costs[i] for i in sequences) / sum(weights)
    lacking = [(-share * weight, m) for m, weight in enumerate(weights)]
    heapq.heapify(lacking)
    parked: list[tuple[int, float, int]] = []  # those without room, until shorter sequences come: (-room, -lack, m)
    out: list[list[int]] = [[] for _ in weights]
    room = [items.room] * len(weights)
    for i in sequences:
        tokens = items.tokens[i]
        while parked and -parked[0][0] >= tokens:
            heapq.heappush(lacking, heapq.heappop(parked)[1:])
        while lacking and room[lacking[0][1]] < tokens:
            lack, m = heapq.heappop(lacking)
            heapq.heappush(parked, (-room[m], lack, m))
        if not lacking:
            return None
        lack, m = lacking[0]
        out[m].append(i)
        room[m] -= tokens
        heapq.heapreplace(lacking, (lack + items.costs[i], m))
    return out


def fill_tightly(sequences: Sequence[int], items: Items, count: int) -> list[list[int]] | None:
    """The sequences of one rank in `count` microbatches, each in the fullest that has room (best fit); None where one finds
    none."""
    out: list[list[int]] = [[] for _ in range(count)]
    rooms = [(items.room, m) for m in range(count)]  # ascending
    for i in sequences:
        at = bisect.bisect_left(rooms, (items.tokens[i], -1))
        if at == count:
            return None
        room, m = rooms.pop(at)
        out[m].append(i)
        bisect.insort(rooms, (room - items.tokens[i], m))
    return out
