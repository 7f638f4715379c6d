"""Greedy assignment of sequences to data-parallel ranks, and of a rank's sequences to microbatches, by cost. O(n log n).

Sequences are named by their index into `PlanItems`. They are assigned in that order, as a rule the longest first.
"""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

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
