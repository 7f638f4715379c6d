"""The formats of a round: a bucket of packed tensors, or a file of them; and memory that carries a bucket between processes.

Both ends of the wire use the formats. The memory is a byte buffer of one process that other processes of the machine map, so
that nothing is copied on the way. On a GPU it is CUDA IPC; on the CPU it is a memfd, an unnamed in-memory file that is freed
with its last user. Runs in the trainer, which exports buffers, and inside the servers, which open them. Nothing is unpickled: a
`BufferHandle` is plain JSON. Facts are of PyTorch 2.13 (vLLM's image). `torch/multiprocessing/reductions.py`, the public user
of the same calls, is byte for byte the same in 2.14.1 (SGLang's image). The CUDA IPC path has never been run.
"""

import contextlib
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # name in `torch`
    crc32: int | None = None  # of the tensor's bytes; None: it need not be checked

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError if the tensor was damaged in transit."""
        if self.crc32 is not None and crc32(tensor) != self.crc32:
            raise ValueError(f"tensor {self.name} was damaged on its way: its CRC-32 is not that of the sender")


@dataclass(frozen=True)
class Bucket:
    """Tensors of one sender, packed into one buffer of bytes, each at a multiple of its dtype's size (see `pack`)."""

    number: int  # of the round in its update, from 0
    sender: int  # index of the sender and of its group
    contents: tuple[TensorEntry, ...]
    handle: BufferHandle | None = None  # of the shared buffer; None: the bucket is broadcast

    @property
    def nbytes(self) -> int:
        """Bytes of the packed buffer."""
        return _places(self.contents)[-1]

    @property
    def checksums(self) -> dict[str, int]:
        """The CRC-32 of each tensor that has one, by name."""
        return {c.name: c.crc32 for c in self.contents if c.crc32 is not None}

    def to_json(self) -> str:
        """Return JSON for `from_json`; no path of a file looks like it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Bucket":
        """Return the bucket that `to_json` wrote."""
        read = json.loads(text)
        contents = tuple(TensorEntry(**content | {"shape": tuple(content["shape"])}) for content in read["contents"])
        handle = None if read["handle"] is None else BufferHandle(**read["handle"])
        return cls(read["number"], read["sender"], contents, handle)

    def tensors(self, row: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view of the uint8 buffer) of each tensor. Raises ValueError for a damaged one."""
        for content, start in zip(self.contents, _places(self.contents), strict=False):
            tensor = row[start : start + content.nbytes].view(getattr(torch, content.dtype)).view(content.shape)
            content.check(tensor)
            yield content.name, tensor


def pack(tensors: Iterable[tuple[str, Tensor]], row: Tensor, with_checksums: bool) -> tuple[TensorEntry, ...]:
    """Copy tensors into a buffer in the layout of a `Bucket`; with the widest dtypes first, it has no gaps."""
    contents: list[TensorEntry] = []
    end = 0
    for name, tensor in tensors:
        start = _aligned(end, tensor.dtype)
        end = start + tensor.nbytes
        row[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        checksum = crc32(tensor) if with_checksums else None
        contents.append(TensorEntry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksum))
    return tuple(contents)


def _places(contents: Sequence[TensorEntry]) -> list[int]:
    places, end = [], 0
    for content in contents:
        places.append(_aligned(end, getattr(torch, content.dtype)))
        end = places[-1] + content.nbytes
    return [*places, end]


def _aligned(end: int, dtype: torch.dtype) -> int:
    return -(-end // dtype.itemsize) * dtype.itemsize


Source = Path | Bucket  # a safetensors file that both sides see, or a bucket that a trainer rank broadcasts or shares


def crc32(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    return zlib.crc32(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()))
