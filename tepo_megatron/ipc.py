"""A row of bytes in the memory of one process that others of the machine map: what is sent of it is where it lies.

On a GPU that is CUDA IPC; on the CPU a file in memory that has no name and ends with its last user. Runs in the trainer, which
lends rows, and inside the servers, which borrow them. Nothing is unpickled: a `Handle` is plain JSON. Facts are of PyTorch
2.13 (vLLM's image); `torch/multiprocessing/reductions.py`, the public user of the same calls, is the same file, byte for byte,
in 2.14.1 (SGLang's image). CUDA IPC has not run.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_NO_COUNTER = b"/tepo-counts-nothing"  # no shared memory has that name


@dataclass(frozen=True)
class Handle:
    """Where a row of `nbytes` lies: in the open file `file` of process `pid`, or in a GPU's memory.

    gpu: its UUID, empty for the CPU; memory: what CUDA calls it, in hexadecimal digits; offset: bytes from where that begins.
    """

    nbytes: int
    pid: int = 0
    file: int = 0
    gpu: str = ""
    memory: str = ""
    offset: int = 0


class Row(Protocol):
    """handle: for others; bytes: uint8 [n], this process's view."""

    handle: Handle
    bytes: Tensor

    def written(self) -> None:
        """Return when others may read what was written."""
        ...

    def close(self) -> None:
        """Give it up. Those who have it mapped still read it on the CPU; on a GPU they must be done."""
        ...


class HostRow:
    """See `Row`."""

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("tepo-weights")
        os.ftruncate(self._file, nbytes)
        self.bytes = torch.frombuffer(mmap.mmap(self._file, nbytes), dtype=torch.uint8)
        self.handle = Handle(nbytes, pid=os.getpid(), file=self._file)

    def written(self) -> None:
        """It is the same memory."""

    def close(self) -> None:
        """The memory is free once nobody has it mapped."""
        os.close(self._file)
        self.bytes = torch.empty(0, dtype=torch.uint8)


class DeviceRow:
    """See `Row`. PyTorch would count its users, one for each handle, and keep the memory until the count is zero; here any
    number opens the one handle, in many rounds, and says when it is done. So the count is zero from the start, and nobody's.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        storage = self.bytes.untyped_storage()
        _, memory, _, offset, counter, counter_offset, _, _ = storage._share_cuda_()
        torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        self.handle = Handle(nbytes, 0, 0, uuid, memory.hex(), offset)

    def written(self) -> None:
        """Once all kernels of this device are over: readers wait for no event."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """The allocator has it back."""
        self.bytes = torch.empty(0, dtype=torch.uint8)


def lend(nbytes: int, device: torch.device) -> Row:
    """A row of this process, zeros or anything."""
    return DeviceRow(nbytes, device) if device.type == "cuda" else HostRow(nbytes)


@contextlib.contextmanager
def borrowed(handle: Handle, device: torch.device) -> Iterator[Tensor]:
    """The row, uint8, as this process reads it on `device`; not after the `with`, whose end waits for those who do.

    Raises ValueError where it cannot be mapped.
    """
    row = _device_row(handle, device) if handle.gpu else _host_row(handle)
    try:
        yield row
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _host_row(handle: Handle) -> Tensor:
    """What is written into it stays in this process."""
    try:
        with open(f"/proc/{handle.pid}/fd/{handle.file}", "rb") as file:
            mapped = mmap.mmap(file.fileno(), handle.nbytes, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as e:
        raise ValueError(
            f"the memory of the trainer's process {handle.pid} cannot be mapped ({e}): sync.transport=ipc is for servers of "
            "the same user, in the same container; use shm or group"
        ) from None
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _device_row(handle: Handle, device: torch.device) -> Tensor:
    """Opened on `device`, whichever GPU it lies on: the two reach each other's memory, or are the same."""
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    there = seen.get(handle.gpu)
    if device.type != "cuda" or there is None or not (there == _index(device) or _reaches(_index(device), there)):
        raise ValueError(
            f"the weights lie on the GPU {handle.gpu}, which {device} does not reach (visible: {', '.join(seen) or 'none'}); "
            "use sync.transport=group"
        )
    storage = torch.UntypedStorage._new_shared_cuda(
        *(_index(device), bytes.fromhex(handle.memory), handle.nbytes, handle.offset),
        *(_NO_COUNTER, 0),  # what frees it would take one off the sender's count, which is zero
        *(b"", False),  # no event: the sender waited before it told
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _reaches(device: int, other: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(device, other))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
