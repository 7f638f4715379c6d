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

LEAST_BYTES = 2**20  # smaller ones stay: they cost more than they free


@dataclass
class _Away:
    """A saved tensor in host memory. ready: when the copy is complete, on a GPU."""

    host: Tensor
    device: torch.device
    ready: torch.cuda.Event | None


class HostActivations:
    """A context in which tensors that autograd saves, from `least_bytes` on, are copied to the host, and back for backward.

    chunks: whose parameters stay where they are. On a GPU copies go to page-locked memory on a stream of their own; on a CPU
    they are copies all the same, which the tests count (`moved` bytes so far) and which help nobody. The bits do not change.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], least_bytes: int = LEAST_BYTES) -> None:
        self._chunks, self._least = chunks, least_bytes
        self._stay: set[int] = set()
        self._stream: torch.cuda.Stream | None = None
        self.moved = 0

    def __enter__(self) -> HostActivations:
        self._stay = {p.untyped_storage().data_ptr() for chunk in self._chunks for p in chunk.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._away, self._back)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)

    def _away(self, x: Tensor) -> Tensor | _Away:
        storage = x.untyped_storage()
        if _in_backward() or x.nbytes < self._least or type(x) is not Tensor or storage.data_ptr() in self._stay:
            return x
        if x.nbytes > storage.nbytes():  # expanded, as the indices of the experts' tokens: a copy would take more than it frees
            return x
        self.moved += x.nbytes
        if not x.is_cuda:
            return _Away(x.clone(), x.device, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self._stream)  # its memory is not given to another tensor before the copy is done
        return _Away(host, x.device, self._stream.record_event())

    def _back(self, kept: Tensor | _Away) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.ready is None:
            return kept.host
        torch.cuda.current_stream(kept.device).wait_event(kept.ready)
        return kept.host.to(kept.device, non_blocking=True)


def _in_backward() -> bool:
    """Whether autograd is at work: what is saved then is computed again, and used at once."""
    return bool(torch._C._current_graph_task_id() != -1)  # as torch.utils.checkpoint asks
