"""Run collectives on GPU tensors over gloo, staged through host memory, so that several ranks share one GPU.

NCCL refuses two ranks on one GPU, and gloo itself takes GPU tensors only in a few collectives. With TEPO_STAGED_GLOO=1 the
ranks of `tests/processes.py` therefore use gloo, and all of them GPU 0. Each collective runs in three steps: copy its inputs to
host memory, run gloo there, copy its outputs back. The code above the collectives is the same as on several GPUs.

On the platform `cpu` the same variable stages every tensor. That adds copies and nothing else, and tries this file without a
GPU: tests/unit/benches/test_gpu_check.py.
"""

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tepo_megatron.dist.platform import Platform, PlatformName, activate, cpu

VARIABLE = "TEPO_STAGED_GLOO"
Staged = Callable[[Tensor], bool]


@dataclass(frozen=True)
class TensorParameters:
    """The parameters of a collective that hold tensors or lists of tensors. A parameter in both fields is changed in place.

    Attributes:
        inputs: names of parameters that are read.
        outputs: names of parameters that are written.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


# The collectives that Megatron-Core calls. all_to_all of lists is not one of them; gloo of torch 2.11 lacks it.
COLLECTIVES = {
    "all_reduce": TensorParameters(("tensor",), ("tensor",)),
    "broadcast": TensorParameters(("tensor",), ("tensor",)),
    "reduce": TensorParameters(("tensor",), ("tensor",)),
    "all_gather": TensorParameters(("tensor",), ("tensor_list",)),
    "all_gather_into_tensor": TensorParameters(("input_tensor",), ("output_tensor",)),
    "reduce_scatter": TensorParameters(("input_list",), ("output",)),
    "reduce_scatter_tensor": TensorParameters(("input",), ("output",)),
    "all_to_all_single": TensorParameters(("input",), ("output",)),
    "gather": TensorParameters(("tensor",), ("gather_list",)),
    "scatter": TensorParameters(("scatter_list",), ("tensor",)),
    "isend": TensorParameters(("tensor",)),  # send and recv call these two
    "irecv": TensorParameters((), ("tensor",)),
}
ALWAYS_ASYNC = ("isend", "irecv")


def requested() -> bool:
    """Return whether the environment asks for staging."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def off_host(tensor: Tensor) -> bool:
    """Return whether gloo cannot access a tensor's memory."""
    return tensor.device.type != "cpu"


def everything(tensor: Tensor) -> bool:
    """Return true for each tensor, so that tensors on the host are staged too."""
    return True


def activate_staged(name: PlatformName) -> Platform:
    """Activate a platform whose collectives are staged, once per process and before Megatron-Core is imported.

    Under `cuda` every rank uses GPU 0 and the collectives of `cpu`.
    """
    assert "megatron.core" not in sys.modules, "it would keep the collectives that it has imported"
    if name == "cpu":
        redirect(everything)
        return activate(name)
    platform = activate(name)
    os.environ["LOCAL_RANK"] = "0"
    redirect(off_host)
    cpu.add_uneven_collectives()
    cpu.shorten_groups_of_one()
    return replace(platform, backend="gloo")


def redirect(staged: Staged) -> None:
    """Replace the collectives in torch.distributed by staged ones."""
    for name, roles in COLLECTIVES.items():
        setattr(dist, name, _staged(getattr(dist, name), roles, staged, always_async=name in ALWAYS_ASYNC))
    for name in ALWAYS_ASYNC:  # P2POp compares its operator with these
        setattr(distributed_c10d, name, getattr(dist, name))
    dist.batch_isend_irecv = distributed_c10d.batch_isend_irecv = _batch_isend_irecv
    dist._coalescing_manager = distributed_c10d._coalescing_manager = _coalescing_manager
    dist.barrier = _barrier_of_the_host(dist.barrier)


@dataclass
class StagedWork:
    """A collective in flight on host copies. It replaces `torch.distributed.Work`.

    Attributes:
        results: pairs (tensor of the caller, host copy to be read when the collective is complete).
        kept: host copies of the inputs, alive until the collective is complete.
    """

    work: Any
    results: list[tuple[Tensor, Tensor]]
    kept: list[Any] = field(default_factory=list)
    done: bool = False

    def wait(self, timeout: Any = None) -> bool:
        """Block until the collective is complete and its outputs are copied back. A second call does nothing."""
        if not self.done:
            if self.work is not None:
                self.work.wait(*(() if timeout is None else (timeout,)))  # raises when gloo failed
            with torch.no_grad():
                for tensor, host in self.results:
                    tensor.copy_(host)
            self.done, self.kept, self.results = True, [], []
        return True

    synchronize = wait

    def _source_rank(self) -> int:
        """Return the sender's rank in the group, which torch's `recv` asks for."""
        return int(self.work._source_rank())

    def is_completed(self) -> bool:
        """Return whether `wait` has nothing left to wait for. Only `wait` copies the outputs back."""
        return self.done or self.work is None or bool(self.work.is_completed())


@dataclass
class CoalescedWork:
    """The handle of a coalescing context. `works`: the handles of its asynchronous collectives."""

    works: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class _OpenContexts(threading.local):
    """The coalescing contexts that the current thread is in, innermost last.

    They are kept per thread, because autograd starts collectives in threads of its own.
    """

    def __init__(self) -> None:
        self.contexts: list[CoalescedWork] = []


_open = _OpenContexts()


@contextlib.contextmanager
def _coalescing_manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[CoalescedWork]:
    """Start the collectives of the context one by one. torch's own manager would hand the tensors to the backend itself."""
    coalesced = CoalescedWork()
    _open.contexts.append(coalesced)
    try:
        yield coalesced
    finally:
        _open.contexts.pop()
    if not async_ops:
        coalesced.wait()


def _staged(original: Callable[..., Any], roles: TensorParameters, staged: Staged, always_async: bool) -> Callable[..., Any]:
    """Return a collective that stages its tensors through host memory if `staged` is true for one of them."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        names = dict.fromkeys((*roles.inputs, *roles.outputs))
        outsider = distributed_c10d._rank_not_in_group(given.get("group"))
        if outsider or not any(staged(t) for name in names for t in _tensors(given.get(name))):
            return _started(original(*args, **kwargs))
        results: list[tuple[Tensor, Tensor]] = []
        for name in names:
            if (value := given.get(name)) is None:
                continue
            hosts = [_on_host(t, filled=name in roles.inputs) for t in _tensors(value)]
            if name in roles.outputs:
                results += zip(_tensors(value), hosts, strict=True)
            given[name] = hosts[0] if isinstance(value, Tensor) else hosts
        kept = [given.get(name) for name in names]
        found = original(*bound.args, **bound.kwargs)
        if always_async or given.get("async_op", False):
            return _started(StagedWork(found, results, kept))
        StagedWork(None, results).wait()
        return found

    return collective


def _started(work: Any) -> Any:
    """Add the handle of an asynchronous collective to the coalescing context that is open, if any."""
    if _open.contexts and hasattr(work, "wait"):
        _open.contexts[-1].works.append(work)
    return work


def _tensors(value: Tensor | Sequence[Tensor] | None) -> Sequence[Tensor]:
    if value is None:
        return ()
    return [value] if isinstance(value, Tensor) else value


def _on_host(tensor: Tensor, filled: bool) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return host.copy_(tensor.detach()) if filled else host


def _batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Any]:
    """Start each operation separately, because gloo has no batches."""
    works = []
    for p2p in p2p_op_list:
        peer = "group_dst" if p2p.op is dist.isend else "group_src"
        works.append(p2p.op(p2p.tensor, group=p2p.group, tag=p2p.tag, **{peer: p2p.group_peer}))
    return [work for work in works if work is not None]


def _barrier_of_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a barrier that ignores `device_ids`, because gloo has a barrier on the host only."""

    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **more: Any) -> Any:
        return original(group=group, async_op=async_op, **more)

    return barrier
