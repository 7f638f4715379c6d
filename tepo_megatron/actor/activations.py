"""Activation offloading: keep the tensors that autograd saves for backward in host memory.

Megatron's own offloading (`fine_grained_activation_offloading`, 0.16 to 0.19) learns from the first update which tensors there
are, and keeps a pool of buffers for each shape. That does not fit packed microbatches, which differ in number and in length.
Here autograd's saved-tensor hooks offload whatever an operation saves; with `training.recompute`, the inputs of recomputed
modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.base.host_sizes import LEAST_OFFLOADED
from tepo_megatron.dist.platform.host_memory import HostPiece, HostStacks


@dataclass
class _Offloaded:
    """A saved tensor in host memory."""

    piece: HostPiece
    host: Tensor
    device: torch.device
    stream: torch.cuda.Stream | None = None
    ready: torch.cuda.Event | None = None


class HostActivations:
    """A context in which tensors that autograd saves are copied to the host, and back to the device for backward.

    On a GPU the copies go to page-locked memory on a separate stream. On a CPU they are made too, only so that tests can count
    them. The bits of the tensors do not change.

    Attributes:
        least_bytes: As given. It may be changed between two uses of the context.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], device: torch.device, least_bytes: int = LEAST_OFFLOADED) -> None:
        self._chunks, self.least_bytes = chunks, least_bytes
        # Host memory, one stack per microbatch in flight. A microbatch begins with the forward pass of a chunk.
        self.memory = HostStacks(device)
        self._stay: set[int] = set()
        self._stream: torch.cuda.Stream | None = None
        self.moved = 0

    def __enter__(self) -> "HostActivations":
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

    def _away(self, x: Tensor) -> Tensor | _Offloaded:
        """Copy a tensor that autograd saves to the host, unless it must stay on the device."""
        storage = x.untyped_storage()
        if _in_backward() or x.nbytes < self.least_bytes or type(x) is not Tensor or storage.data_ptr() in self._stay:
            return x
        if x.nbytes > storage.nbytes():  # expanded, like the experts' token indices: a copy takes more than it frees
            return x
        self.moved += x.nbytes
        piece = self.memory.take(x.nbytes)
        strides = torch.empty_like(x, device="meta").stride()
        host = piece.data.view(x.dtype).as_strided(x.shape, strides)
        if not x.is_cuda:
            host.copy_(x)
            return _Offloaded(piece, host, x.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self._stream)  # the allocator must not reuse its memory before the copy is done
        return _Offloaded(piece, host, x.device, self._stream, self._stream.record_event())

    def _back(self, kept: Tensor | _Offloaded) -> Tensor:
        """Return the saved tensor on its device."""
        if isinstance(kept, Tensor):
            return kept
        back = torch.empty_like(kept.host, device=kept.device)
        if kept.stream is None:
            return back.copy_(kept.host)
        current = torch.cuda.current_stream(kept.device)
        current.wait_event(kept.ready)
        back.copy_(kept.host, non_blocking=True)
        kept.stream.wait_stream(current)  # the next copy into this host memory must come after this one
        return back


def _in_backward() -> bool:
    """Return whether backward is running. Tensors saved then come from recomputation and are used at once."""
    return bool(torch._C._current_graph_task_id() != -1)  # torch.utils.checkpoint uses the same test
