"""Add the collectives that Megatron-Core uses and gloo lacks (torch 2.13): those on lists of tensors of unequal sizes.

The token dispatcher of a mixture of experts needs them when experts are also split over tensor-parallel ranks (EP with TP).
gloo has everything else that Megatron-Core calls, including bf16 and ReduceOp.AVG.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = dist.ProcessGroup | None


def add_uneven_collectives() -> None:
    """Let all_gather and reduce_scatter take lists of unequal shapes. They run as one broadcast or one reduction per rank."""
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)


def shorten_groups_of_one() -> None:
    """Replace all_gather_into_tensor and reduce_scatter_tensor, in a group of one rank, by a copy or by nothing.

    Nothing is copied if input and output are the same memory. The distributed optimizer passes views of one buffer, which gloo
    would copy twice.
    """
    dist.all_gather_into_tensor = _all_gather_into_tensor(dist.all_gather_into_tensor)
    dist.reduce_scatter_tensor = _reduce_scatter_tensor(dist.reduce_scatter_tensor)


def _all_gather_into_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective with a shortcut for groups of one rank; asynchronous calls go to gloo."""

    @functools.wraps(original)
    def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False) -> Any:
        if async_op or dist.get_world_size(group) > 1:
            return original(output_tensor, input_tensor, group=group, async_op=async_op)
        return _copy(output_tensor, input_tensor)

    return all_gather_into_tensor


def _reduce_scatter_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective with a shortcut for groups of one rank; asynchronous calls go to gloo."""

    @functools.wraps(original)
    def reduce_scatter_tensor(
        output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Group = None, async_op: bool = False
    ) -> Any:
        if async_op or dist.get_world_size(group) > 1:
            return original(output, input, op=op, group=group, async_op=async_op)
        return _copy(output, input)  # the sum, mean, minimum or maximum of one tensor is the tensor

    return reduce_scatter_tensor


def _copy(output: Tensor, source: Tensor) -> None:
    if output.data_ptr() != source.data_ptr():
        output.copy_(source.view_as(output))


def _are_equal(tensors: list[Tensor]) -> bool:
    return len({t.shape for t in tensors}) == 1


def _uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an all_gather that broadcasts from each rank in turn if shapes differ; asynchronous calls go to gloo."""

    @functools.wraps(original)
    def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False) -> Any:
        if async_op or _are_equal(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, part in enumerate(tensor_list):
            dist.broadcast(part, group_src=rank, group=group)

    return all_gather


def _uneven_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduce_scatter that reduces to each rank in turn if shapes differ; asynchronous calls go to gloo."""

    @functools.wraps(original)
    def reduce_scatter(
        output: Tensor, input_list: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Group = None, async_op: bool = False
    ) -> Any:
        if async_op or _are_equal(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        for rank, part in enumerate(input_list):
            reduced = part.clone()  # gloo leaves partial sums on the other ranks
            dist.reduce(reduced, group_dst=rank, op=op, group=group)
            if rank == dist.get_rank(group):
                output.copy_(reduced)

    return reduce_scatter
