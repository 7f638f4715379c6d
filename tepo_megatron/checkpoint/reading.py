"""Read shard slices out of a checkpoint in Megatron's distributed format, on any parallel layout."""

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
    """Reads shard slices out of a checkpoint. They need not be the shard slices that were written."""

    def __init__(self, folder: Path, reader: MetadataReader, metadata: Metadata) -> None:
        self._folder, self._reader, self._metadata = folder, reader, metadata

    @classmethod
    def open(cls, folder: Path) -> "SliceReader":
        """Read the metadata of the checkpoint in `folder`. Raises CheckpointError when it is missing or damaged."""
        reader = MetadataReader(folder)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        return cls(folder, reader, metadata)

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return {n for n, m in self._metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}

    def plan(self, shard_slices: Sequence[ShardSlice]) -> list[list[ReadItem]]:
        """Return the read items of each shard slice.

        Raises CheckpointError for a missing tensor or one of another shape or dtype.
        """
        return [self._items(shard_slice, i) for i, shard_slice in enumerate(shard_slices)]

    def read(self, shard_slices: Sequence[ShardSlice], items: Sequence[Sequence[ReadItem]]) -> None:
        """Fill the data of the shard slices, in place. What a flexible shard slice has beyond the stored tensor becomes 0.

        Raises OSError if a file cannot be read.
        """
        for shard_slice in shard_slices:
            if shard_slice.flexible:
                shard_slice.data.zero_()
        everything = [item for of_box in items for item in of_box]
        self._reader.read_data(LoadPlan(everything), _Targets(shard_slices)).wait()

    def read_bytes(self, name: str) -> bytes:
        """Return the byte string of this name. Raises OSError."""
        index, targets = MetadataIndex(name), _Targets(())
        zero = torch.Size((0,))
        item = ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)
        self._reader.read_data(LoadPlan([item]), targets).wait()
        return targets.bytes[name]

    def _items(self, shard_slice: ShardSlice, place: int) -> list[ReadItem]:
        stored = self._metadata.state_dict_metadata.get(shard_slice.name)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(
                f"{self._folder}: has no tensor {shard_slice.name}; resume with the model that it was saved from"
            )
        if stored.properties.dtype != shard_slice.data.dtype:
            raise CheckpointError(
                f"{self._folder}: {shard_slice.name} is {stored.properties.dtype}, and {shard_slice.data.dtype} here; "
                "resume with the model.precision that it was saved with"
            )
        if tuple(stored.size) != shard_slice.shape and not shard_slice.flexible:
            raise CheckpointError(
                f"{self._folder}: {shard_slice.name} has the shape {tuple(stored.size)}, and {shard_slice.shape} here; "
                "resume with the model that it was saved from"
            )
        items = create_read_items_for_chunk_list(shard_slice.name, stored, [chunk(shard_slice)])
        # `_Targets` finds a shard slice by its index in the list, because two shard slices may have the same name and offset
        return [replace(item, dest_index=MetadataIndex(str(place))) for item in items]


class _Targets:
    """Tells `FileSystemReader.read_data`, in the place of a load planner, where to put each item."""

    def __init__(self, shard_slices: Sequence[ShardSlice]) -> None:
        self._shard_slices = shard_slices
        self.bytes: dict[str, bytes] = {}

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        target = self._shard_slices[int(item.dest_index.fqn)].data
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        pass

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        self.bytes[item.dest_index.fqn] = value.getvalue()
