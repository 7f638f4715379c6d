"""The safetensors files that carry an update, as a server reads them. Runs inside the servers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

# The output layer's name in every Hugging Face causal language model; with tied embeddings it may be there or not.
OUTPUT_LAYER = "lm_head.weight"


def check_tensors(paths: Sequence[str], model: str | Path, tied_embeddings: bool) -> None:
    """Raise ValueError unless the files hold exactly the tensors of the checkpoint in the folder `model`, in their shapes.

    A cast to the served dtype is no fault. The engines' own loaders leave a missing weight as it was, drop an unknown one and
    cut one that is too large, without a word.
    """
    checkpoint = sorted(Path(model).glob("*.safetensors"))
    expected = {name: shape for path in checkpoint for name, shape in _shapes(path).items()}
    given = [item for path in paths for item in _shapes(path).items()]
    names = Counter(name for name, _ in given)
    optional = {OUTPUT_LAYER} if tied_embeddings else set()
    faults = {
        "given twice": {name for name, count in names.items() if count > 1},
        "unknown": names.keys() - expected.keys() - optional,
        "missing": expected.keys() - names.keys() - optional,
        "of another shape": {name for name, shape in given if shape != expected.get(name, shape)},
    }
    found = [f"{len(them)} {fault}: {', '.join(sorted(them)[:5])}" for fault, them in faults.items() if them]
    if found:
        raise ValueError(f"the files do not hold the tensors of the model ({'; '.join(found)})")


def tensors(paths: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the host) of each file in turn; a file is mapped, not read, and only while its tensors are in use."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


def _shapes(path: str | Path) -> dict[str, list[int]]:
    """name -> shape of the tensors in a safetensors file, from its header: 8 bytes of length, then JSON."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
