"""Megatron-Core's distributed format (`torch_dist`, which is that of torch.distributed.checkpoint), as it is written.

    __0_0.distcp   what rank 0 wrote: one `torch.save` after the other
    .metadata      every tensor's shape, and in which file, at which byte, each box of it begins
    common.pt, metadata.json   what `megatron.core.dist_checkpointing.load` looks for besides

Megatron's own writer (0.16) forks processes per file while other threads run, gets its results through a manager process that
imports the main module again, waits without limit, and knows no checksums; so the files are written here, by a thread.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
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
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from tepo_megatron.checkpoint.files import FileSum, SummedFile, write
from tepo_megatron.checkpoint.state import Box

METADATA = ".metadata"
Stored = dict[MetadataIndex, _StorageInfo]


def plan(boxes: Sequence[Box], objects: Iterable[str]) -> SavePlan:
    """What this rank writes: `boxes`, then byte strings of these names."""
    items = [_write_item(box) for box in boxes]
    return SavePlan([*items, *(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects)])


def merge(plans: list[SavePlan]) -> Metadata:
    """What all ranks write. Raises AssertionError when the boxes of a tensor do not fill it: no checkpoint without a weight."""
    _, metadata = create_default_global_save_plan(plans)
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            filled = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            assert filled == math.prod(tensor.size), f"{name}: {filled} of {math.prod(tensor.size)} elements would be written"
    return metadata


class HostCopy:
    """Memory of the host for what this rank writes, kept from one checkpoint to the next."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, boxes: Sequence[Box]) -> list[Tensor]:
        """Copies of the boxes' data, at rest when this returns; overwritten by the next call."""
        starts = [0]
        for box in boxes:
            starts.append(starts[-1] + -(-box.data.nbytes // 64) * 64)  # aligned for any dtype
        if self._buffer.numel() < starts[-1]:
            pinned = any(box.data.is_cuda for box in boxes)
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the former is free before the next is there
            self._buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pinned)
        memory = self._buffer.numpy()
        copies = []
        for box, start in zip(boxes, starts, strict=False):
            # a storage of its own: torch.save writes whole storages
            copy = torch.frombuffer(memory, dtype=box.data.dtype, count=box.data.numel(), offset=start).view(box.data.shape)
            copies.append(copy.copy_(box.data, non_blocking=True))
        if any(box.data.is_cuda for box in boxes):
            torch.cuda.current_stream().synchronize()
        return copies


def write_items(path: Path, items: Sequence[WriteItem], values: Sequence[Tensor | bytes]) -> tuple[FileSum, Stored]:
    """One rank's file, on disk. Raises OSError."""
    stored = {}
    with SummedFile(path) as f:
        for item, value in zip(items, values, strict=True):
            start = f.tell()
            torch.save(value, f) if isinstance(value, Tensor) else f.write(value)
            stored[item.index] = _StorageInfo(path.name, start, f.tell() - start)
    return f.sum, stored


def write_metadata(folder: Path, metadata: Metadata, stored: Stored, common: Mapping[str, Any]) -> dict[str, FileSum]:
    """The files that belong to no rank. Returns their sums by name. Raises OSError."""
    whole = replace(metadata, storage_data=stored, storage_meta=StorageMeta())
    buffer = io.BytesIO()
    torch.save(dict(common), buffer)
    contents = {
        METADATA: pickle.dumps(whole),
        "common.pt": buffer.getvalue(),
        "metadata.json": json.dumps(asdict(CheckpointingConfig("torch_dist"))).encode(),
    }
    return {name: write(folder / name, data) for name, data in contents.items()}


def _write_item(box: Box) -> WriteItem:
    properties = TensorProperties(dtype=box.data.dtype)
    write_data = TensorWriteData(chunk(box), properties, torch.Size(box.shape))
    return WriteItem(MetadataIndex(box.name, box.offset), WriteItemType.SHARD, tensor_data=write_data)


def chunk(box: Box) -> ChunkStorageMetadata:
    """Where a box lies in its tensor."""
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.data.shape))
