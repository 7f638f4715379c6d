"""Write Megatron-Core's distributed format (`torch_dist`), which is that of torch.distributed.checkpoint.

    __0_0.distcp   what rank 0 wrote: one `torch.save` archive after the other
    .metadata      every tensor's shape, and the file and first byte of each of its shard slices
    common.pt, metadata.json   what `megatron.core.dist_checkpointing.load` needs in addition

Megatron's own writer (0.16) forks processes per file while other threads run, gets its results through a manager process that
imports the main module again, waits without limit, and has no checksums. Therefore a thread of this package writes the files.
"""

import io
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo  # its name is part of the format: `.metadata` pickles it
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tepo_megatron.base.errors import CheckpointError
from tepo_megatron.base.restricted_pickle import METADATA
from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint.folder import ChecksummedFile, FileChecksum, write
from tepo_megatron.checkpoint.state import ShardSlice
from tepo_megatron.dist.objects import broadcast_object, gather_object
from tepo_megatron.dist.platform.memory import HostArena

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


class SavePlanner:
    """The save plans of all ranks. They are exchanged at the first save, and again when one has changed.

    Only the saving thread of each rank uses it. Collectives are over `group`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._source: tuple[Sequence[ShardSlice], Sequence[str]] = ((), ())  # the arguments from which `_made` was made
        self._made: SavePlan | None = None
        self._sent: SavePlan | None = None  # this rank's plan that rank 0 received last
        self._plans: list[SavePlan | None] = [None] * group.size()
        self._metadata: Metadata | None = None

    def agree(self, shard_slices: Sequence[ShardSlice], objects: Sequence[str]) -> tuple[Sequence[WriteItem], Metadata | None]:
        """Exchange plans with all ranks, and return what this rank writes.

        Collectives: one gather and one broadcast of objects. Returns the write items of this rank, in that order, and on rank 0
        the metadata of what all ranks write (None elsewhere). Raises CheckpointError on every rank when the shard slices of
        a tensor do not add up to it. So no checkpoint lacks a weight.
        """
        mine = self._plan(shard_slices, objects)
        changes = gather_object(None if mine is self._sent or mine == self._sent else mine, self.group)
        error = None
        if any(change is not None for change in changes):
            self._plans = [new or old for new, old in zip(changes, self._plans, strict=True)]
            try:
                self._metadata = merge([p for p in self._plans if p is not None])
            except (AssertionError, ValueError) as e:
                error = f"rank 0: what the ranks write is no whole state ({e})"
        if (error := broadcast_object(error, self.group)) is not None:
            raise CheckpointError(error)
        self._sent = mine
        return mine.items, self._metadata

    def _plan(self, shard_slices: Sequence[ShardSlice], objects: Sequence[str]) -> SavePlan:
        """Return the plan of this rank, cached as long as `shard_slices` is the same object and `objects` is equal."""
        if self._made is None or self._source[0] is not shard_slices or self._source[1] != objects:
            self._made, self._source = plan(shard_slices, objects), (shard_slices, objects)
        return self._made


def create_folder(folder: Path, step: int, refused: str | None, group: dist.ProcessGroup) -> None:
    """Create the empty folder of a checkpoint on rank 0. Collectives: one broadcast of an object.

    `refused`: on rank 0, why the checkpoint cannot be written; None: create the folder. Ignored elsewhere. Raises
    CheckpointError on every rank when `refused` is given or the folder cannot be created.
    """
    error = refused
    if group.rank() == 0 and error is None:
        try:
            folders.prepare(folder, step)
        except OSError as e:
            error = str(e)
    if (error := broadcast_object(error, group)) is not None:
        raise CheckpointError(f"rank 0: {folders.partial(folder, step)}: cannot be begun ({error})")


def plan(shard_slices: Sequence[ShardSlice], objects: Sequence[str]) -> SavePlan:
    """Return the save plan of this rank."""
    items = [_write_item(shard_slice) for shard_slice in shard_slices]
    return SavePlan([*items, *(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects)])


def merge(plans: list[SavePlan]) -> Metadata:
    """Return the metadata of what all ranks write."""
    _, metadata = create_default_global_save_plan(plans)
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            filled = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            assert filled == math.prod(tensor.size), f"{name}: {filled} of {math.prod(tensor.size)} elements would be written"
    return metadata


def _write_item(shard_slice: ShardSlice) -> WriteItem:
    properties = TensorProperties(dtype=shard_slice.data.dtype)
    write_data = TensorWriteData(chunk(shard_slice), properties, torch.Size(shard_slice.shape))
    return WriteItem(MetadataIndex(shard_slice.name, shard_slice.offset), WriteItemType.SHARD, tensor_data=write_data)
