"""The offsets between the clocks of ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from tepo_megatron.observability.clock_offset import ROUND_TRIPS, SAME, ClockOffset, measure


def offset_to_rank_0(group: dist.ProcessGroup, clock: Callable[[], int]) -> ClockOffset:
    """Return the offset of this rank's clock against that of rank 0.

    Collectives: `ROUND_TRIPS` messages of 8 bytes in each direction between rank 0 and every other rank, one rank after the
    other. The first round trip of a rank waits for its turn, and the shortest one counts. `clock`: clock of this rank, in ns.
    """
    message = torch.zeros(1, dtype=torch.int64)
    if group.rank() == 0:
        for rank in range(1, group.size()):
            for _ in range(ROUND_TRIPS):
                dist.recv(message, group=group, group_src=rank)
                message[0] = clock()
                dist.send(message, group=group, group_dst=rank)
        return SAME

    def ask() -> int:
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        return int(message)

    return measure(ask, clock)
