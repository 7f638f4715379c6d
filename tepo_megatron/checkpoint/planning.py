"""Agree with all ranks on what each of them writes, and create the folder to write to, while training goes on."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint.state import ShardSlice
from tepo_megatron.checkpoint.tensors import chunk
from tepo_megatron.distributed.objects import broadcast_object, gather_object
from tepo_megatron.errors import CheckpointError


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
        the metadata of what all ranks write (None elsewhere). Raises CheckpointError if on every rank, when the shard slices of
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
    CheckpointError if on every rank, when `refused` is given or the folder cannot be created.
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
    """Return the metadata of what all ranks write.

    Raises AssertionError when the shard slices of a tensor have, in total, more or fewer elements than the tensor.
    """
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
