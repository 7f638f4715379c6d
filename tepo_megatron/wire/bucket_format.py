"""The formats of a round: a bucket of packed tensors, or a file of them. Both ends of the wire use them."""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tepo_megatron.wire.ipc import BufferHandle


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
