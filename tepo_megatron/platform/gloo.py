"""Collectives that Megatron-Core uses and gloo lacks (torch 2.13): lists of tensors of unequal sizes.

The token dispatcher of a mixture of experts needs them when experts are split by tensors (EP with TP). Everything else that
Megatron-Core calls is there, bf16 and ReduceOp.AVG included: tests/parallel/test_collectives.py calls each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor


def add_uneven_collectives() -> None:
    """all_gather into, and reduce_scatter from, lists of unequal shapes, as one broadcast or reduction per rank."""
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)


def shorten_groups_of_one() -> None:
    """A rank that is alone in its group has what it would receive, and the distributed optimizer gives and takes views of one
    buffer: gloo would copy it twice."""
    dist.all_gather_into_tensor = _all_gather_into_tensor(dist.all_gather_into_tensor)
    dist.reduce_scatter_tensor = _reduce_scatter_tensor(dist.reduce_scatter_tensor)


def _all_gather_into_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather_into_tensor(
        output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> Any:
        if async_op or dist.get_world_size(group) > 1:
            return original(output_tensor, input_tensor, group=group, async_op=async_op)
        return _copy(output_tensor, input_tensor)

    return all_gather_into_tensor


def _reduce_scatter_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter_tensor(
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or dist.get_world_size(group) > 1:
            return original(output, input, op=op, group=group, async_op=async_op)
        return _copy(output, input)  # a sum, mean, least or largest of one

    return reduce_scatter_tensor


def _copy(output: Tensor, given: Tensor) -> None:
    if output.data_ptr() != given.data_ptr():
        output.copy_(given.view_as(output))


def _are_equal(tensors: list[Tensor]) -> bool:
    return len({t.shape for t in tensors}) == 1


def _uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(
        tensor_list: list[Tensor],
        tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or _are_equal(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, part in enumerate(tensor_list):
            dist.broadcast(part, group_src=rank, group=group)

    return all_gather


def _uneven_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter(
        output: Tensor,
        input_list: list[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or _are_equal(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        for rank, part in enumerate(input_list):
            reduced = part.clone()  # gloo leaves partial sums on the other ranks
            dist.reduce(reduced, group_dst=rank, op=op, group=group)
            if rank == dist.get_rank(group):
                output.copy_(reduced)

    return reduce_scatter
