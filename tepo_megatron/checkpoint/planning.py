"""What all ranks write, and room for it: agreed on beside the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint.agreement import from_main, to_main
from tepo_megatron.checkpoint.state import Box
from tepo_megatron.checkpoint.tensors import chunk
from tepo_megatron.errors import CheckpointError


class Plans:
    """What all ranks write: exchanged at the first save, and when it has changed.

    It belongs to the saving threads, of which one is at work at a time. Collectives are over `group`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._source: tuple[Sequence[Box], Sequence[str]] = ((), ())  # of what `_made` is the plan
        self._made: SavePlan | None = None
        self._told: SavePlan | None = None
        self._plans: list[SavePlan | None] = [None] * group.size()
        self._metadata: Metadata | None = None

    def agree(self, boxes: Sequence[Box], objects: Sequence[str]) -> tuple[Sequence[WriteItem], Metadata | None]:
        """What this rank writes, `boxes` and then byte strings of the names `objects`; and on rank 0 what all ranks do.

        Raises CheckpointError, on every rank, where boxes of a tensor lack or do not fill it: no checkpoint without a weight.
        """
        mine = self._plan(boxes, objects)
        changes = to_main(None if mine is self._told or mine == self._told else mine, self.group)
        error = None
        if any(change is not None for change in changes):
            self._plans = [new or old for new, old in zip(changes, self._plans, strict=True)]
            try:
                self._metadata = merge([p for p in self._plans if p is not None])
            except (AssertionError, ValueError) as e:
                error = f"rank 0: what the ranks write is no whole state ({e})"
        error = from_main(error, self.group)
        if error is not None:
            raise CheckpointError(error)
        self._told = mine
        return mine.items, self._metadata

    def _plan(self, boxes: Sequence[Box], objects: Sequence[str]) -> SavePlan:
        if self._made is None or self._source[0] is not boxes or self._source[1] != objects:
            self._made, self._source = plan(boxes, objects), (boxes, objects)
        return self._made


def make_room(folder: Path, step: int, refused: str | None, group: dist.ProcessGroup) -> None:
    """An empty folder for the checkpoint of `step`, made by rank 0 unless it has refused to write one. Collective over `group`.

    Raises CheckpointError, on every rank, when it was refused or there is no room.
    """
    error = refused
    if group.rank() == 0 and error is None:
        try:
            folders.prepare(folder, step)
        except OSError as e:
            error = str(e)
    error = from_main(error, group)
    if error is not None:
        raise CheckpointError(f"rank 0: {folders.partial(folder, step)}: cannot be begun ({error})")


def plan(boxes: Sequence[Box], objects: Sequence[str]) -> SavePlan:
    """What this rank writes: `boxes`, then byte strings of these names."""
    items = [_write_item(box) for box in boxes]
    return SavePlan([*items, *(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects)])


def merge(plans: list[SavePlan]) -> Metadata:
    """What all ranks write. Raises AssertionError when the boxes of a tensor do not fill it."""
    _, metadata = create_default_global_save_plan(plans)
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            filled = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            assert filled == math.prod(tensor.size), f"{name}: {filled} of {math.prod(tensor.size)} elements would be written"
    return metadata


def _write_item(box: Box) -> WriteItem:
    properties = TensorProperties(dtype=box.data.dtype)
    write_data = TensorWriteData(chunk(box), properties, torch.Size(box.shape))
    return WriteItem(MetadataIndex(box.name, box.offset), WriteItemType.SHARD, tensor_data=write_data)
