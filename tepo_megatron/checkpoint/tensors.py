"""Write Megatron-Core's distributed format (`torch_dist`), which is that of torch.distributed.checkpoint.

    __0_0.distcp   what rank 0 wrote: one `torch.save` archive after the other
    .metadata      every tensor's shape, and the file and first byte of each of its shard slices
    common.pt, metadata.json   what `megatron.core.dist_checkpointing.load` needs in addition

Megatron's own writer (0.16) forks processes per file while other threads run, gets its results through a manager process that
imports the main module again, waits without limit, and has no checksums. Therefore a thread of this package writes the files.
"""

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo  # its name is part of the format: `.metadata` pickles it
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from tepo_megatron.checkpoint.files import ChecksummedFile, FileChecksum, write
from tepo_megatron.checkpoint.state import ShardSlice
from tepo_megatron.platform.host_memory import HostArena
from tepo_megatron.utils.restricted_pickle import METADATA

Stored = dict[MetadataIndex, _StorageInfo]


class HostCopy:
    """A host copy of what this rank writes. Its memory is kept from one checkpoint to the next."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self.arena = HostArena(self._device)
        self._shard_slices: Sequence[ShardSlice] = ()
        self._copies: Sequence[ShardSlice] = ()
        self._from: list[Tensor] = []
        self._to: list[Tensor] = []

    def take(self, shard_slices: Sequence[ShardSlice]) -> Sequence[ShardSlice]:
        """Copy the data of the shard slices to host memory, and return the same shard slices with these copies as their data.

        The copies are complete when this returns, and the next call overwrites them. If `shard_slices` is the same object as in
        the call before, so is the result.
        """
        if shard_slices is not self._shard_slices:
            self._make_places(shard_slices)
        if shard_slices:
            torch._foreach_copy_(self._to, self._from, non_blocking=True)  # a loop takes a third longer for a small model
        if any(data.is_cuda for data in self._from):
            torch.cuda.current_stream().synchronize()
        return self._copies

    def _make_places(self, shard_slices: Sequence[ShardSlice]) -> None:
        self._copies, self._to = (), []  # so that the arena can free its memory before it allocates more
        self._from = [shard_slice.data for shard_slice in shard_slices]
        device = next((data.device for data in self._from if data.is_cuda), torch.device("cpu"))
        if self._device != device:
            self._device, self.arena = device, HostArena(device)
        # each piece has a storage of its own: torch.save writes whole storages
        pieces = self.arena.pieces([data.nbytes for data in self._from])
        self._to = [piece.view(data.dtype).view(data.shape) for piece, data in zip(pieces, self._from, strict=True)]
        self._copies = [replace(shard_slice, data=data) for shard_slice, data in zip(shard_slices, self._to, strict=True)]
        self._shard_slices = shard_slices


def write_items(path: Path, items: Sequence[WriteItem], values: Sequence[Tensor | bytes]) -> tuple[FileChecksum, Stored]:
    """Write one rank's file and sync it to disk."""
    stored = {}
    with ChecksummedFile(path) as f:
        for item, value in zip(items, values, strict=True):
            start = f.tell()
            torch.save(value, f) if isinstance(value, Tensor) else f.write(value)
            stored[item.index] = _StorageInfo(path.name, start, f.tell() - start)
    return f.sum, stored


def write_metadata(folder: Path, metadata: Metadata, stored: Stored, common: Mapping[str, Any]) -> dict[str, FileChecksum]:
    """Write the files that do not belong to one rank: `.metadata`, common.pt and metadata.json."""
    whole = replace(metadata, storage_data=stored, storage_meta=StorageMeta())
    contents = {
        METADATA: pickle.dumps(whole),
        "common.pt": pickled(dict(common)),
        "metadata.json": json.dumps(asdict(CheckpointingConfig("torch_dist"))).encode(),
    }
    return {name: write(folder / name, data) for name, data in contents.items()}


def pickled(value: Any) -> bytes:
    """Return `value` as torch.save serializes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def chunk(shard_slice: ShardSlice) -> ChunkStorageMetadata:
    """Return the offset and shape of a shard slice in its global tensor."""
    return ChunkStorageMetadata(torch.Size(shard_slice.offset), torch.Size(shard_slice.data.shape))
