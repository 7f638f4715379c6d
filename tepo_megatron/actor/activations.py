"""What backward needs of the forward pass waits for it in host memory.

Megatron's own offloading (`fine_grained_activation_offloading`, 0.16 to 0.19) learns from the first update which tensors there
are, and keeps a pool of buffers for each of their shapes: packed microbatches differ in number and in length. Here autograd's
own hooks do it, for whatever an operation saves: with `training.recompute`, the inputs of what is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.host_sizes import LEAST_OFFLOADED
from tepo_megatron.platform.host_memory import HostPiece, HostStacks


@dataclass
class _Away:
    """A saved tensor in host memory.

    piece: its memory, which is another tensor's when this object is gone. host: the tensor. stream: copies of it were issued
    there, None on a CPU. ready: recorded there when the copy to the host is complete.
    """

    piece: HostPiece
    host: Tensor
    device: torch.device
    stream: torch.cuda.Stream | None = None
    ready: torch.cuda.Event | None = None


class HostActivations:
    """A context in which tensors that autograd saves, from `least_bytes` on, are copied to the host, and back for backward.

    chunks: whose parameters stay where they are. On a GPU copies go to page-locked memory on a stream of their own; on a CPU
    they are copies all the same, which the tests count (`moved` bytes so far) and which help nobody. The bits do not change.
    memory: on the host, a stack for each microbatch under way: a microbatch begins with the forward pass of a chunk.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], device: torch.device, least_bytes: int = LEAST_OFFLOADED) -> None:
        self._chunks, self._least = chunks, least_bytes
        self.memory = HostStacks(device)
        self._stay: set[int] = set()
        self._stream: torch.cuda.Stream | None = None
        self.moved = 0

    def __enter__(self) -> HostActivations:
        self._stay = {p.untyped_storage().data_ptr() for chunk in self._chunks for p in chunk.parameters()}
        self.memory.settle()
        self._begins = [chunk.register_forward_pre_hook(lambda *_: self.memory.begin()) for chunk in self._chunks]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._away, self._back)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        for hook in self._begins:
            hook.remove()

    def _away(self, x: Tensor) -> Tensor | _Away:
        storage = x.untyped_storage()
        if _in_backward() or x.nbytes < self._least or type(x) is not Tensor or storage.data_ptr() in self._stay:
            return x
        if x.nbytes > storage.nbytes():  # expanded, as the indices of the experts' tokens: a copy would take more than it frees
            return x
        self.moved += x.nbytes
        piece = self.memory.take(x.nbytes)
        strides = torch.empty_like(x, device="meta").stride()
        host = piece.data.view(x.dtype).as_strided(x.shape, strides)
        if not x.is_cuda:
            host.copy_(x)
            return _Away(piece, host, x.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self._stream)  # its memory is not given to another tensor before the copy is done
        return _Away(piece, host, x.device, self._stream, self._stream.record_event())

    def _back(self, kept: Tensor | _Away) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        back = torch.empty_like(kept.host, device=kept.device)
        if kept.stream is None:
            return back.copy_(kept.host)
        current = torch.cuda.current_stream(kept.device)
        current.wait_event(kept.ready)
        back.copy_(kept.host, non_blocking=True)
        kept.stream.wait_stream(current)  # the next tensor in this memory is copied on that stream, so after this copy
        return back


def _in_backward() -> bool:
    """Whether autograd is at work: what is saved then is computed again, and used at once."""
    return bool(torch._C._current_graph_task_id() != -1)  # as torch.utils.checkpoint asks
