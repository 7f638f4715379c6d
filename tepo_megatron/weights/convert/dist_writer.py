"""Writing Megatron-Core's `torch_dist` checkpoints: PyTorch's distributed checkpoint (DCP) format and two files beside it.

A `.distcp` file is a row of torch.save archives, one for each piece of a global tensor; `.metadata` is a pickle of which piece
lies where. DCP's own writer is not used: it keeps the last piece of every key in memory until its file ends (torch 2.13,
`filesystem._write_files_from_queue`), which is the whole model where layers have keys of their own.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from tepo_megatron.weights.convert.sink import Sink

_FILE_BYTES = 4 * 2**30
_ALIGNMENT = 64  # of each archive in its file, so that mapped tensors are aligned as torch.save aligns them


class Writer:
    """Writes a checkpoint piece by piece, through its `streams`; it can be read once `finish` has returned.

    streams: their number. Each has files of its own, so that a thread each may use them. What is written does not depend on the
    order of their work among each other.
    """

    def __init__(self, directory: Path, streams: int = 1) -> None:
        self._directory = directory
        self.streams = tuple(Stream(directory, i, streams) for i in range(streams))

    def finish(self, common: Mapping[str, Any]) -> None:
        """Write the rest. common: what is not sharded (the iteration and the like)."""
        self.close()
        torch.save(dict(common), self._directory / COMMON_STATE_FNAME)
        tensors: dict[str, Any] = {}
        results = []
        for w in sorted((w for s in self.streams for w in s.written), key=lambda w: (w.key, w.offsets)):
            if w.properties is None:
                tensors[w.key], index = BytesStorageMetadata(), MetadataIndex(w.key)
            else:
                entry = tensors.setdefault(w.key, TensorStorageMetadata(w.properties, w.size, []))
                index = MetadataIndex(w.key, w.offsets, len(entry.chunks))
                entry.chunks.append(ChunkStorageMetadata(w.offsets, w.shape))
            results.append(WriteResult(index, w.place.length, w.place))
        FileSystemWriter(self._directory).finish(Metadata(tensors), [results])
        save_config(CheckpointingConfig("torch_dist", 1), str(self._directory))

    def close(self, sync: bool = True) -> None:
        """Close the files that are being written."""
        for stream in self.streams:
            stream.close(sync)


@dataclass(frozen=True)
class _Written:
    """One archive: a piece of a tensor (size: of the whole one), or, without properties, an object."""

    key: str
    place: _StorageInfo
    properties: TensorProperties | None = None
    size: torch.Size = torch.Size()  # noqa: RUF009  immutable
    offsets: torch.Size = torch.Size()  # noqa: RUF009
    shape: torch.Size = torch.Size()  # noqa: RUF009


class Stream:
    """Writes archives one after the other, to `__0_N.distcp`, then `__0_{N + step}.distcp` and so on. For one thread."""

    def __init__(self, directory: Path, first: int, step: int) -> None:
        self.written: list[_Written] = []
        self._directory = directory
        self._next, self._step = first, step
        self._sink: Sink | None = None

    def add(self, piece: ShardedTensor) -> None:
        """Write one piece with its data. Its memory is free again when this returns."""
        assert piece.data is not None
        data = _alone(piece.data).view((1,) * piece.prepend_axis_num + tuple(piece.local_shape))
        place = self._write(lambda sink: torch.save(data, sink))
        size, offsets = torch.Size(piece.global_shape), torch.Size(piece.global_offset)
        self.written.append(_Written(piece.key, place, TensorProperties(dtype=data.dtype), size, offsets, data.shape))

    def add_object(self, piece: ShardedObject) -> None:
        """Write what a module keeps beside its parameters."""
        archive = io.BytesIO()
        torch.save([piece.data], archive)
        self.written.append(_Written(piece.unique_key, self._write(lambda sink: sink.write(archive.getbuffer()))))

    def close(self, sync: bool = True) -> None:
        """Close the file that is being written."""
        if self._sink is not None:
            self._sink.close(sync)
            self._sink = None

    def _write(self, write: Callable[[Any], object]) -> _StorageInfo:
        if self._sink is not None and self._sink.tell() >= _FILE_BYTES:
            self.close()
        if self._sink is None:
            self._name = f"__0_{self._next}.distcp"
            self._sink = Sink(self._directory / self._name)
            self._next += self._step
        self._sink.write(bytes(-self._sink.tell() % _ALIGNMENT))
        start = self._sink.tell()
        try:
            write(self._sink)
        except RuntimeError:
            if self._sink.failure is None:
                raise
            raise self._sink.failure from None
        return _StorageInfo(self._name, start, self._sink.tell() - start)


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """torch.save computes none in this block: torch.load does not look at them, and they take six times the writing.

    The option belongs to the process, or (PyTorch 2.13) to the context of a thread: other threads must run in a copy of it.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _alone(tensor: Tensor) -> Tensor:
    """The same values in a storage of their own, without a copy where they are contiguous: torch.save writes whole storages."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.untyped_storage().nbytes() == flat.nbytes or not flat.numel():
        return flat.view(tensor.shape)
    return torch.frombuffer(flat.view(torch.uint8).numpy(), dtype=tensor.dtype).view(tensor.shape)
