"""Describe what a checkpoint holds, without reading its tensors."""

import dataclasses
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.base.errors import CheckpointError, ConversionError
from tepo_megatron.base.restricted_pickle import load_metadata
from tepo_megatron.checkpoint.convert import HF_FOLDER
from tepo_megatron.checkpoint.convert.dist_reader import read_common
from tepo_megatron.checkpoint.convert.places import megatron_directory
from tepo_megatron.models.families import find_family, read_config
from tepo_megatron.models.fp8 import SCALE_SUFFIX
from tepo_megatron.models.hf_io import HfReader

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
