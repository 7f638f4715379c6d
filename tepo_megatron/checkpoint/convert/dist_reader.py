"""Read Megatron-Core's `torch_dist` checkpoints (dist_writer.py describes the format).

PyTorch's own reader plans a load of the whole model; this one memory-maps pieces of it on request.
"""

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

from tepo_megatron.base.errors import CheckpointError
from tepo_megatron.base.restricted_pickle import load_metadata

_COMMON = "common.pt"


class DistCheckpointReader:
    """Reads the tensors of a checkpoint, whatever layout wrote it. Several threads may read at a time.

    The constructor and every method raise CheckpointError for a file that is missing, truncated or not what `.metadata` says.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        metadata = load_metadata(directory)
        # metadata (shape, dtype, pieces) of each global tensor, by its key
        self.tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self._places: dict[MetadataIndex, Any] = metadata.storage_data
        self._check_files()

    def region(self, key: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a rectangular part of a global tensor; elements beyond the tensor's end are 0.

        If one stored piece is exactly this part, the result is a memory map of its file: pages are read where they are touched,
        and stay in memory until the tensor is released. Do not change the result in place.
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
        """Return one stored piece: a memory map if the archive says at which byte its data begin, else a copy."""
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
                    return torch.load(archive, map_location="cpu", weights_only=True)
                start = place.offset + inside
                before = start % mmap.ALLOCATIONGRANULARITY  # a map must begin at a page
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
        """Raise CheckpointError for a file that is missing, too short or compressed."""
        for index, place in self._places.items():
            path = self.directory / place.relative_path
            size = path.stat().st_size if path.exists() else None
            if size is None or size < place.offset + place.length:
                state = "missing" if size is None else f"truncated to {size} bytes"
                raise CheckpointError(f"{path}: {state}, but .metadata puts {index.fqn} there; copy the checkpoint again")
            if getattr(place, "transform_descriptors", None):
                raise CheckpointError(f"{path}: {index.fqn} is compressed, which is not read; save the checkpoint without it")


def read_common(directory: Path) -> dict[str, Any]:
    """Return the content of `common.pt`, the part of a checkpoint that is not sharded; {} if torch.load refuses its objects.

    Raises CheckpointError when the file is missing or damaged.
    """
    path = directory / _COMMON
    try:
        common = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; {directory} is no finished Megatron checkpoint") from None
    except pickle.UnpicklingError:
        return {}  # it holds objects of a training script (its arguments), which a conversion does not need
    except (RuntimeError, OSError, EOFError) as e:
        raise CheckpointError(f"{path}: truncated or corrupt ({e}); copy the checkpoint again") from None
    return common if isinstance(common, dict) else {}
