"""Exchange Python objects between ranks, so that all ranks come to the same conclusion. The only module that does.

Every function is a collective over an explicit group, and waits no longer than the group's timeout. Objects are pickled, so a
group must consist of processes of one run.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


def all_gather_object(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return every rank's value, in the order of ranks."""
    values: list[T] = [value] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_object(value: T, group: dist.ProcessGroup) -> list[T]:
    """Gather every rank's value on rank 0 of the group.

    Returns on rank 0 the values in the order of ranks; on other ranks an empty list.
    """
    values: list[T] | None = [value] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def broadcast_object(value: T, group: dist.ProcessGroup) -> T:
    """Return rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0, device=torch.device("cpu"))
    return box[0]


def broadcast_result(make: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Return on every rank what a call returns on rank 0. If the call raises an error there, every rank raises it."""
    outcome: tuple[T | None, Exception | None]
    try:
        outcome = make(), None
    except Exception as e:
        if group.rank():
            raise
        outcome = None, e
    result, error = broadcast_object(outcome, group)
    if error is not None:
        raise error
    return cast(T, result)


def all_true(value: bool, group: dist.ProcessGroup) -> bool:
    """Return whether `value` is true on every rank. This costs one all-reduce of a number."""
    flag = torch.tensor(int(value))
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)


@contextlib.contextmanager
def same_error(group: dist.ProcessGroup, kinds: tuple[type[Exception], ...], error: type[Exception]) -> Iterator[None]:
    """Turn an error within the block, on any rank, into the same error on all ranks. Collectives: one all-gather."""
    mine = None
    try:
        yield
    except kinds as e:
        mine = f"rank {group.rank()}: {e}"
    for message in all_gather_object(mine, group):
        if message is not None:
            raise error(message)
