"""Read boxes out of a checkpoint in Megatron's distributed format, on any parallel layout."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tepo_megatron.checkpoint.state import ShardSlice
from tepo_megatron.checkpoint.tensors import chunk
from tepo_megatron.errors import CheckpointError
from tepo_megatron.utils.restricted_pickle import MetadataReader


class SliceReader:
    """Reads boxes out of a checkpoint. They need not be the boxes that were written."""

    def __init__(self, folder: Path, reader: MetadataReader, metadata: Metadata) -> None:
        self._folder, self._reader, self._metadata = folder, reader, metadata

    @classmethod
    def open(cls, folder: Path) -> SliceReader:
        """Read the metadata of the checkpoint in `folder`. Raises CheckpointError when it is missing or damaged."""
        reader = MetadataReader(folder)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        return cls(folder, reader, metadata)

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return {n for n, m in self._metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}

    def plan(self, boxes: Sequence[ShardSlice]) -> list[list[ReadItem]]:
        """Return the read items of each box. Raises CheckpointError for a missing tensor or one of another shape or dtype."""
        return [self._items(box, i) for i, box in enumerate(boxes)]

    def read(self, boxes: Sequence[ShardSlice], items: Sequence[Sequence[ReadItem]]) -> None:
        """Fill the data of the boxes, in place. What a flexible box has beyond the stored tensor becomes 0.

        Args:
            boxes: the boxes to fill.
            items: what `plan` returned for them.

        Raises:
            OSError: a file cannot be read.
        """
        for box in boxes:
            if box.flexible:
                box.data.zero_()
        everything = [item for of_box in items for item in of_box]
        self._reader.read_data(LoadPlan(everything), _Targets(boxes)).wait()

    def read_bytes(self, name: str) -> bytes:
        """Return the byte string of this name. Raises OSError."""
        index, targets = MetadataIndex(name), _Targets(())
        zero = torch.Size((0,))
        item = ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)
        self._reader.read_data(LoadPlan([item]), targets).wait()
        return targets.bytes[name]

    def _items(self, box: ShardSlice, place: int) -> list[ReadItem]:
        """Return the read items of one box, `place` being its index in the list of boxes."""
        stored = self._metadata.state_dict_metadata.get(box.name)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self._folder}: has no tensor {box.name}; resume with the model that it was saved from")
        if stored.properties.dtype != box.data.dtype:
            raise CheckpointError(
                f"{self._folder}: {box.name} is {stored.properties.dtype}, and {box.data.dtype} here; resume with the "
                "model.precision that it was saved with"
            )
        if tuple(stored.size) != box.shape and not box.flexible:
            raise CheckpointError(
                f"{self._folder}: {box.name} has the shape {tuple(stored.size)}, and {box.shape} here; resume with the model "
                "that it was saved from"
            )
        items = create_read_items_for_chunk_list(box.name, stored, [chunk(box)])
        # `_Targets` finds a box by its index in the list, because two boxes may have the same name and offset
        return [replace(item, dest_index=MetadataIndex(str(place))) for item in items]


class _Targets:
    """Tells `FileSystemReader.read_data`, in the place of a load planner, where to put each item."""

    def __init__(self, boxes: Sequence[ShardSlice]) -> None:
        self._boxes = boxes
        self.bytes: dict[str, bytes] = {}

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        target = self._boxes[int(item.dest_index.fqn)].data
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the data are in place already.

        Args:
            item: what was read.
            tensor: what `resolve_tensor` returned for it, filled.
        """

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        self.bytes[item.dest_index.fqn] = value.getvalue()
