"""Run unmodified Megatron-Core on a CPU, with its collectives over gloo.

Megatron-Core (0.16.1, and 0.19.2 by `make test-pins`) calls `torch.cuda` throughout, although little of it needs a GPU. Each
redirection is one function that states its reason, in a file for each kind:

    cuda_api.py   torch.cuda (current device, streams, events, memory, random state), and tensors that request a CUDA device
    cpu.py        two collectives that gloo lacks, and shortcuts for groups of one rank
    memory.py     keep freed memory, which glibc would return to the system at once
    mcore.py      import Megatron-Core, fix its bugs on machines without GPU and Transformer Engine, and give it a fused Adam

Redirections last as long as the process and affect all of it: a process is either a CPU process or a CUDA process.

The collectives are those on lists of tensors of unequal sizes (torch 2.13). The token dispatcher of a mixture of experts needs
them when experts are also split over tensor-parallel ranks (EP with TP). gloo has everything else that Megatron-Core calls,
including bf16 and ReduceOp.AVG.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from tepo_megatron.dist.platform import cuda_api, mcore, memory


def install(transformer_engine: bool = False) -> None:
    """Redirect `torch.cuda` to the CPU, then import Megatron-Core."""
    hide_gpus()
    cuda_api.redirect_factories()
    cuda_api.redirect_tensor_methods()
    cuda_api.redirect_device_queries()
    cuda_api.redirect_streams_and_events()
    cuda_api.redirect_memory_statistics()
    cuda_api.redirect_random_state()
    cuda_api.silence_nvtx()
    add_uneven_collectives()
    shorten_groups_of_one()
    if not transformer_engine:
        mcore.hide_gpu_packages()
    mcore.provide_triton_to_paged_stash()
    with mcore.without_compilation(), mcore.without_import_warnings():
        mcore.load()
    mcore.fix_missing_transformer_engine_names()
    mcore.fix_host_copy_of_splits()
    if not transformer_engine:
        mcore.use_host_adam()
    mcore.silence_generator_warning()
    memory.keep_freed_memory()


def hide_gpus() -> None:
    """Hide GPUs from CUDA itself too.

    Otherwise autograd, in C++, starts a thread for each GPU that it finds, and a forked child cannot use autograd then.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


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
