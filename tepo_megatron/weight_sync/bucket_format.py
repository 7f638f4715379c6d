"""The formats of a round: a bucket of packed tensors, or a file of them. Both ends of the wire use them."""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.weight_sync.element_deltas import Encoding
from tepo_megatron.weight_sync.ipc import BufferHandle

ENCODED = "encoded"  # key in the header of a file whose tensors are encoded: the round's number, and the encodings
REFUSED = "refused-"  # begin of the name of the file by which a server's process refuses a round of encoded files


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # name in `torch`
    crc32: int | None = None  # of the tensor's bytes; None: it need not be checked
    encoding: Encoding | None = None  # with `sync.delta=elements`; shape and dtype are those of what is sent

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
        """The CRC-32 of each tensor that has one, by name; of an encoded tensor that of the decoded one."""
        found = {c.name: c.crc32 if c.encoding is None else c.encoding.crc32 for c in self.contents}
        return {name: checksum for name, checksum in found.items() if checksum is not None}

    @property
    def encodings(self) -> dict[str, Encoding]:
        """The encoding of each tensor that has one, by name."""
        return {c.name: c.encoding for c in self.contents if c.encoding is not None}

    def to_json(self) -> str:
        """Return JSON for `from_json`; no path of a file looks like it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Bucket":
        """Return the bucket that `to_json` wrote."""
        read = json.loads(text)
        contents = tuple(_entry(content) for content in read["contents"])
        handle = None if read["handle"] is None else BufferHandle(**read["handle"])
        return cls(read["number"], read["sender"], contents, handle)

    def tensors(self, row: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view of the uint8 buffer) of each tensor. Raises ValueError for a damaged one."""
        for content, start in zip(self.contents, _places(self.contents), strict=False):
            tensor = row[start : start + content.nbytes].view(getattr(torch, content.dtype)).view(content.shape)
            content.check(tensor)
            yield content.name, tensor


def _entry(fields: Mapping[str, Any]) -> TensorEntry:
    encoding = None if fields["encoding"] is None else Encoding.from_json(fields["encoding"])
    return TensorEntry(fields["name"], tuple(fields["shape"]), fields["dtype"], fields["crc32"], encoding)


def pack(
    tensors: Iterable[tuple[str, Tensor]], row: Tensor, with_checksums: bool, encodings: Mapping[str, Encoding] | None = None
) -> tuple[TensorEntry, ...]:
    """Copy tensors into a buffer in the layout of a `Bucket`; with the widest dtypes first, it has no gaps.

    Args:
        encodings: Encodings by name, which may be filled in while the tensors are iterated. None: none is encoded.
    """
    packer = BucketPacker(row, with_checksums, encodings)
    for name, tensor in tensors:
        packer.add(name, tensor)
    return tuple(packer.contents)


class BucketPacker:
    """Copies tensors into a buffer, one after the other; see `pack`."""

    def __init__(self, row: Tensor, with_checksums: bool, encodings: Mapping[str, Encoding] | None = None) -> None:
        """Begin at the start of the buffer."""
        self.contents: list[TensorEntry] = []
        self._row, self._with_checksums, self._encodings, self._end = row, with_checksums, encodings, 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor."""
        start = _aligned(self._end, tensor.dtype)
        self._end = start + tensor.nbytes
        self._row[start : self._end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        encoding = self._encodings.get(name) if self._encodings else None
        checksum = crc32(tensor) if self._with_checksums and encoding is None else None
        self.contents.append(TensorEntry(name, tuple(tensor.shape), dtype_name(tensor), checksum, encoding))


def _places(contents: Sequence[TensorEntry]) -> list[int]:
    """Return the offset of each tensor in the buffer, and the end of the last one."""
    places, end = [], 0
    for content in contents:
        places.append(_aligned(end, getattr(torch, content.dtype)))
        end = places[-1] + content.nbytes
    return [*places, end]


def _aligned(end: int, dtype: torch.dtype) -> int:
    return -(-end // dtype.itemsize) * dtype.itemsize


Source = Path | Bucket  # a safetensors file that both sides see, or a bucket that a trainer rank broadcasts or shares


def dtype_name(tensor: Tensor) -> str:
    """Return the name in `torch` of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def crc32(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    return zlib.crc32(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()))
