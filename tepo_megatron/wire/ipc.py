"""A byte buffer in the memory of one process that other processes of the machine map, so that nothing is copied on the way.

On a GPU it is CUDA IPC; on the CPU it is a memfd, an unnamed in-memory file that is freed with its last user. Runs in the
trainer, which exports buffers, and inside the servers, which open them. Nothing is unpickled: a `BufferHandle` is plain JSON.
Facts are of PyTorch 2.13 (vLLM's image). `torch/multiprocessing/reductions.py`, the public user of the same calls, is byte for
byte the same in 2.14.1 (SGLang's image). The CUDA IPC path has never been run.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_NO_COUNTER = b"/tepo-counts-nothing"  # no shared memory has this name


@dataclass(frozen=True)
class BufferHandle:
    """The location of a buffer: in a file that a process has open, or in a GPU's memory."""

    nbytes: int
    pid: int = 0  # on the CPU: process that has the file open
    file: int = 0  # on the CPU: file descriptor in that process
    gpu: str = ""  # UUID of the GPU; empty for the CPU
    memory: str = ""  # on a GPU: the CUDA IPC handle in hexadecimal digits
    offset: int = 0  # on a GPU: bytes from the start of that allocation to the buffer


class IpcBuffer(Protocol):
    """An exported buffer."""

    handle: BufferHandle
    bytes: Tensor

    def flush(self) -> None:
        """Return when other processes may read what was written."""

    def close(self) -> None:
        """Release the buffer. On the CPU processes that have it mapped can still read it; on a GPU they must be done."""


class HostBuffer:
    """A buffer in a memfd. See `IpcBuffer`."""

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("tepo-weights")
        os.ftruncate(self._file, nbytes)
        self.bytes = torch.frombuffer(mmap.mmap(self._file, nbytes), dtype=torch.uint8)
        self.handle = BufferHandle(nbytes, pid=os.getpid(), file=self._file)

    def flush(self) -> None:
        """Do nothing: the readers map the same memory."""

    def close(self) -> None:
        """Release the buffer; its memory is freed once no process has it mapped."""
        os.close(self._file)
        self.bytes = torch.empty(0, dtype=torch.uint8)


class DeviceBuffer:
    """A buffer in a GPU's memory. See `IpcBuffer`.

    PyTorch would count the users, one per handle, and keep the memory until the count is zero. Here any number of readers open
    the one handle, in many rounds, and report when they are done. So the count is set to zero at the start and never used.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _, memory, _, offset, counter, counter_offset, _, _ = self.bytes.untyped_storage()._share_cuda_()
        torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        self.handle = BufferHandle(nbytes, 0, 0, uuid, memory.hex(), offset)

    def flush(self) -> None:
        """Wait for all kernels of this device, because readers wait for no event."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Return the memory to the allocator."""
        self.bytes = torch.empty(0, dtype=torch.uint8)


def export_buffer(nbytes: int, device: torch.device) -> IpcBuffer:
    """Return a new buffer of this process, uninitialized."""
    return DeviceBuffer(nbytes, device) if device.type == "cuda" else HostBuffer(nbytes)


@contextlib.contextmanager
def open_buffer(handle: BufferHandle, device: torch.device) -> Iterator[Tensor]:
    """Map the buffer for this process and yield it as a uint8 tensor.

    The tensor must not be used after the `with` block, whose end waits for the kernels that read it. Raises ValueError if the
    buffer cannot be mapped.
    """
    row = _open_device_buffer(handle, device) if handle.gpu else _open_host_buffer(handle)
    try:
        yield row
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _open_host_buffer(handle: BufferHandle) -> Tensor:
    """Map a buffer on the CPU, copy-on-write: what is written into it stays in this process."""
    try:
        with open(f"/proc/{handle.pid}/fd/{handle.file}", "rb") as file:
            mapped = mmap.mmap(file.fileno(), handle.nbytes, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as e:
        raise ValueError(
            f"the memory of the trainer's process {handle.pid} cannot be mapped ({e}): sync.transport=ipc is for servers of "
            "the same user, in the same container; use shm or group"
        ) from None
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _open_device_buffer(handle: BufferHandle, device: torch.device) -> Tensor:
    """Open a buffer that lies on the same GPU as `device` or on one whose memory it reaches (peer access)."""
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    own_index = seen.get(handle.gpu)
    if device.type != "cuda" or own_index is None or not (own_index == _index(device) or _reaches(_index(device), own_index)):
        raise ValueError(
            f"the weights lie on the GPU {handle.gpu}, which {device} does not reach (visible: {', '.join(seen) or 'none'}); "
            "use sync.transport=group"
        )
    storage = torch.UntypedStorage._new_shared_cuda(
        _index(device),
        bytes.fromhex(handle.memory),
        handle.nbytes,
        handle.offset,
        _NO_COUNTER,
        0,  # freeing would decrement the sender's count, which is zero
        b"",
        False,  # no event: the sender synchronized before it sent the handle
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _reaches(device: int, other: int) -> bool:
    return bool(torch.cuda.can_device_access_peer(device, other))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
