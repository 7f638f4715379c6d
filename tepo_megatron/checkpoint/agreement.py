"""Exchange Python objects between ranks, so that all ranks come to the same conclusion.

Every function is a collective over its group and waits no longer than the group's timeout.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def from_all(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return every rank's value, in the order of ranks.

    Args:
        value: this rank's value; it must be picklable.
        group: every rank of it calls.
    """
    values: list[T] = [value] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def to_main(value: T, group: dist.ProcessGroup) -> list[T]:
    """Gather every rank's value on rank 0 of the group.

    Args:
        value: this rank's value; it must be picklable.
        group: every rank of it calls.

    Returns:
        On rank 0 the values in the order of ranks; on other ranks an empty list.
    """
    values: list[T] | None = [value] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def from_main(value: T, group: dist.ProcessGroup) -> T:
    """Return rank 0's value on every rank.

    Args:
        value: the value to broadcast; it is ignored on all ranks but 0.
        group: every rank of it calls.
    """
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0, device=torch.device("cpu"))
    return box[0]


def all_true(value: bool, group: dist.ProcessGroup) -> bool:
    """Return whether `value` is true on every rank. This costs one all-reduce of a number.

    Args:
        value: this rank's value.
        group: every rank of it calls.
    """
    flag = torch.tensor(int(value))
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)
