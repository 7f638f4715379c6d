"""Read Megatron-Core's `torch_dist` checkpoints (importing.py describes the format), and describe what a checkpoint holds.

PyTorch's own reader plans a load of the whole model; this one memory-maps pieces of it on request.
"""

import dataclasses
import math
import mmap
import pickle
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from tepo_megatron.base.errors import CheckpointError, ConversionError
from tepo_megatron.base.restricted_pickle import load_metadata
from tepo_megatron.checkpoint.convert import HF_FOLDER
from tepo_megatron.checkpoint.convert.directories import megatron_directory
from tepo_megatron.models.families import find_family, read_config
from tepo_megatron.models.fp8 import SCALE_SUFFIX
from tepo_megatron.models.hf_io import HfReader

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


# Names of a GPTModel's parameters begin with one of these modules. Other tensors are an optimizer's.
_MODEL = ("embedding", "decoder", "output_layer")


@dataclass(frozen=True)
class CheckpointContents:
    """The content of a checkpoint, as far as its metadata tell."""

    path: Path
    kind: str  # Hugging Face or Megatron, in words
    model: str  # family and architecture in lines of text, or why they are not known
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of the model's tensors, by name
    others: tuple[int, int] = (0, 0)  # number and bytes of the other tensors (an optimizer's state)
    iteration: int | None = None  # training step of the checkpoint; None if it is not known

    def lines(self, list_tensors: bool) -> list[str]:
        """Return a description in lines."""
        sizes = {name: math.prod(shape) for name, (shape, _) in self.tensors.items()}
        total = sum(sizes[n] * t.itemsize for n, (_, t) in self.tensors.items())
        dtypes = Counter[str]()
        parameters = {name: size for name, size in sizes.items() if not name.endswith(SCALE_SUFFIX)}
        for name, (_, dtype) in self.tensors.items():
            if name in parameters:
                dtypes[str(dtype).removeprefix("torch.")] += sizes[name]
        parts = ", ".join(f"{n:,} in {dtype}" for dtype, n in dtypes.most_common())
        text = [f"{self.path}: {self.kind}", *self.model.splitlines()]
        text.append(f"tensors: {len(self.tensors)}, {total:,} bytes")
        text.append(f"parameters: {sum(parameters.values()):,} ({parts})")
        if self.others[0]:
            text.append(f"in addition to the model: {self.others[0]} tensors, {self.others[1]:,} bytes (optimizer state)")
        if self.iteration is not None:
            text.append(f"iteration: {self.iteration}")
        if list_tensors:
            text += [
                f"  {n}  {list(shape)}  {str(dtype).removeprefix('torch.')}"
                for n, (shape, dtype) in sorted(self.tensors.items())
            ]
        return text


def inspect(path: Path) -> CheckpointContents:
    """Describe a HF directory or a Megatron checkpoint; its files tell which one it is. Raises CheckpointError for neither."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    directory = megatron_directory(path)
    if (directory / ".metadata").exists():
        return _megatron(directory)
    if any(path.glob("*.safetensors")):
        tensors = {n: (tuple(t.shape), t.dtype) for n, t in HfReader(path).shapes().items()}
        return CheckpointContents(path, "Hugging Face model", _describe(path), tensors)
    raise CheckpointError(f"{path}: neither a Hugging Face model (*.safetensors) nor a Megatron checkpoint (.metadata)")


def _megatron(directory: Path) -> CheckpointContents:
    tensors, others = {}, Counter[str]()
    for name, entry in load_metadata(directory).state_dict_metadata.items():
        if not hasattr(entry, "size"):  # an object
            continue
        if name.split(".")[0] in _MODEL:
            tensors[name] = (tuple(entry.size), entry.properties.dtype)
        else:
            others.update(tensors=1, bytes=math.prod(entry.size) * entry.properties.dtype.itemsize)
    kind, model = "Megatron checkpoint (torch_dist)", _describe(directory / HF_FOLDER)
    counts = (others["tensors"], others["bytes"])
    return CheckpointContents(directory, kind, model, tensors, counts, _iteration(directory))


def _iteration(directory: Path) -> int | None:
    """Return the iteration that common.pt states, else the one in the name of the directory, else None."""
    stated: Any = read_common(directory).get("iteration")
    named = re.fullmatch(r"(?:iter_|step-)(\d+)", directory.name)
    return stated if isinstance(stated, int) else int(named[1]) if named else None


def _describe(folder: Path) -> str:
    """Return family and architecture in lines of text, or why they are not known."""
    try:
        hf_config = read_config(folder)
        quantized = hf_config.pop("quantization_config", None)
        family = find_family(hf_config)
        arch = family.architecture(hf_config)
    except (CheckpointError, ConversionError) as e:
        return f"family: not known ({e})"
    fields = {f.name: getattr(arch, f.name) for f in dataclasses.fields(arch)}
    shown = [f"{name}={value}" for name, value in fields.items() if value is not None]
    how = f"\nquantized: {quantized.get('quant_method')}" if isinstance(quantized, dict) else ""
    return f"family: {family.name}\narchitecture: " + ", ".join(shown) + how
