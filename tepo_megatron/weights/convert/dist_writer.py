"""Writing Megatron-Core's `torch_dist` checkpoints: PyTorch's distributed checkpoint (DCP) format and two files beside it.

A `.distcp` file is a row of torch.save archives, one for each piece of a global tensor; `.metadata` is a pickle of which piece
lies where. DCP's own writer is not used: it keeps the last piece of every key in memory until its file ends (torch 2.13,
`filesystem._write_files_from_queue`), which is the whole model where layers have keys of their own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
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
    """Writes a checkpoint piece by piece; it can be read once `finish` has returned."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, Any] = {}
        self._results: list[WriteResult] = []
        self._files = 0
        self._sink: Sink | None = None

    def add(self, piece: ShardedTensor) -> None:
        """Write one piece with its data. Its memory is free again when this returns."""
        assert piece.data is not None
        data = _alone(piece.data).view((1,) * piece.prepend_axis_num + tuple(piece.local_shape))
        properties = TensorProperties(dtype=data.dtype)
        entry = self._tensors.setdefault(piece.key, TensorStorageMetadata(properties, torch.Size(piece.global_shape), []))
        offsets = torch.Size(piece.global_offset)
        index = MetadataIndex(piece.key, offsets, len(entry.chunks))
        entry.chunks.append(ChunkStorageMetadata(offsets, data.shape))
        checked = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # torch.load does not look at it, and it takes six times the writing
        try:
            self._write(index, lambda sink: torch.save(data, sink))
        finally:
            torch.serialization.set_crc32_options(checked)

    def add_object(self, piece: ShardedObject) -> None:
        """Write what a module keeps beside its parameters."""
        archive = io.BytesIO()
        torch.save([piece.data], archive)
        self._tensors[piece.unique_key] = BytesStorageMetadata()
        self._write(MetadataIndex(piece.unique_key), lambda sink: sink.write(archive.getbuffer()))

    def finish(self, common: Mapping[str, Any]) -> None:
        """Write the rest. common: what is not sharded (the iteration and the like)."""
        self.close()
        torch.save(dict(common), self._directory / COMMON_STATE_FNAME)
        FileSystemWriter(self._directory).finish(Metadata(self._tensors), [self._results])
        save_config(CheckpointingConfig("torch_dist", 1), str(self._directory))

    def close(self, sync: bool = True) -> None:
        """Close the file that is being written."""
        if self._sink is not None:
            self._sink.close(sync)
            self._sink = None

    def _write(self, index: MetadataIndex, write: Callable[[Any], object]) -> None:
        if self._sink is not None and self._sink.tell() >= _FILE_BYTES:
            self.close()
        if self._sink is None:
            self._name = f"__0_{self._files}.distcp"
            self._sink = Sink(self._directory / self._name)
            self._files += 1
        self._sink.write(bytes(-self._sink.tell() % _ALIGNMENT))
        start = self._sink.tell()
        try:
            write(self._sink)
        except RuntimeError:
            if self._sink.failure is None:
                raise
            raise self._sink.failure from None
        length = self._sink.tell() - start
        self._results.append(WriteResult(index, length, _StorageInfo(self._name, start, length)))


def _alone(tensor: Tensor) -> Tensor:
    """The same values in a storage of their own, without a copy where they are contiguous: torch.save writes whole storages."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.untyped_storage().nbytes() == flat.nbytes or not flat.numel():
        return flat.view(tensor.shape)
    return torch.frombuffer(flat.view(torch.uint8).numpy(), dtype=tensor.dtype).view(tensor.shape)
