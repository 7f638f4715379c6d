"""Collectives on plain objects, by which ranks come to the same conclusion. All are bounded by the group's timeout."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def from_all(value: T, group: dist.ProcessGroup) -> list[T]:
    """Every rank's value, by rank."""
    values: list[T] = [value] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def to_main(value: T, group: dist.ProcessGroup) -> list[T]:
    """Every rank's value, by rank, on rank 0; elsewhere an empty list."""
    values: list[T] | None = [value] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def from_main(value: T, group: dist.ProcessGroup) -> T:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0, device=torch.device("cpu"))
    return box[0]


def all_true(value: bool, group: dist.ProcessGroup) -> bool:
    """Whether it is true on every rank."""
    flag = torch.tensor(int(value))
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)
