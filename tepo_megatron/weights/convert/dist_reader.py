"""Reading Megatron-Core's `torch_dist` checkpoints (see dist_writer.py for the format).

DCP's own reader plans a load of the whole model; this one maps pieces of it as they are asked for.
"""

from __future__ import annotations

import math
import mmap
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from tepo_megatron.errors import CheckpointError
from tepo_megatron.restricted_pickle import load_metadata

_COMMON = "common.pt"


class Reader:
    """The tensors of a checkpoint, whatever layout wrote it. Several threads may read at a time.

    Raises CheckpointError for a file that is missing, truncated or not what `.metadata` says.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        metadata = load_metadata(directory)
        self.tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self._places: dict[MetadataIndex, Any] = metadata.storage_data
        self._check_files()

    def region(self, key: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The part of a global tensor from `offsets` on; where the tensor ends before, zeros. Not to be changed in place.

        A stored piece is a map of its place in the file: it takes memory where it is touched, until the tensor is let go.
        """
        exact = MetadataIndex(key, torch.Size(offsets))
        if exact in self._places and (part := self._piece(exact)).shape == torch.Size(shape):
            return part
        whole, filled = torch.zeros(tuple(shape), dtype=self.tensors[key].properties.dtype), 0
        for chunk in self.tensors[key].chunks:
            low = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offsets, shape, chunk.offsets, chunk.sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                part = self._piece(MetadataIndex(key, chunk.offsets))
                if part.shape != chunk.sizes:
                    raise CheckpointError(
                        f"{self.directory}: a piece of {key} has another shape than .metadata says; copy the checkpoint again"
                    )
                inside = tuple(slice(a - b, c - b) for a, c, b in zip(low, high, chunk.offsets, strict=True))
                whole[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))] = part[inside]
                filled += part[inside].numel()
        inside_tensor = (min(a + n, m) - a for a, n, m in zip(offsets, shape, self.tensors[key].size, strict=True))
        if filled != math.prod(max(0, n) for n in inside_tensor):
            raise CheckpointError(f"{self.directory}: .metadata lists no data for a part of {key}; save the checkpoint again")
        return whole

    def _piece(self, index: MetadataIndex) -> Tensor:
        """One stored piece: a map of its file where the archive tells its place, else a copy."""
        place = self._places[index]
        path = self.directory / place.relative_path
        try:
            with path.open("rb", buffering=0) as file:
                archive = cast(BinaryIO, _create_file_view(file, place.offset, place.length))
                described: Tensor = torch.load(archive, map_location="meta", weights_only=True)
                storage = described.untyped_storage()
                inside = getattr(storage, "_checkpoint_offset", None)  # None before torch 2.13
                if inside is None or not described.is_contiguous() or storage.nbytes() != described.nbytes:
                    archive.seek(0)
                    copied: Tensor = torch.load(archive, map_location="cpu", weights_only=True)
                    return copied
                start = place.offset + inside
                before = start % mmap.ALLOCATIONGRANULARITY  # a map begins with a page
                length = before + storage.nbytes()
                mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start - before)
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=storage.nbytes(), offset=before)
        except (RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as e:
            raise CheckpointError(
                f"{path}: the piece of {index.fqn} at byte {place.offset} is corrupt ({e}); copy the checkpoint again"
            ) from None
        aligned = raw if start % described.element_size() == 0 else raw.clone()
        return aligned.view(described.dtype).view(described.shape)

    def _check_files(self) -> None:
        for index, place in self._places.items():
            path = self.directory / place.relative_path
            size = path.stat().st_size if path.exists() else None
            if size is None or size < place.offset + place.length:
                state = "missing" if size is None else f"truncated to {size} bytes"
                raise CheckpointError(f"{path}: {state}, but .metadata puts {index.fqn} there; copy the checkpoint again")
            if getattr(place, "transform_descriptors", None):
                raise CheckpointError(f"{path}: {index.fqn} is compressed, which is not read; save the checkpoint without it")


def read_common(directory: Path) -> dict[str, Any]:
    """`common.pt`: what is not sharded. Raises CheckpointError."""
    path = directory / _COMMON
    try:
        common = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; {directory} is no finished Megatron checkpoint") from None
    except pickle.UnpicklingError:
        return {}  # objects of a training script (its arguments): nothing that a conversion needs
    except (RuntimeError, OSError, EOFError) as e:
        raise CheckpointError(f"{path}: truncated or corrupt ({e}); copy the checkpoint again") from None
    return common if isinstance(common, dict) else {}
