"""One file per model family: a declarative table, used by loading, export and weight sync alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.errors import CheckpointError, ConversionError
from tepo_megatron.weights.ops import Architecture, Op


@dataclass(frozen=True)
class Row:
    """Megatron parameter name <-> HF tensor names; `{layer}` is the layer's number in the whole model."""

    megatron: str
    hf: tuple[str, ...]
    op: Op


@dataclass(frozen=True)
class Family:
    """A model family. read: a HF config as an Architecture, with ConversionError for what is not supported."""

    name: str
    read: Callable[[Mapping[str, Any]], Architecture]
    rows: tuple[Row, ...]

    def architecture(self, hf_config: Mapping[str, Any]) -> Architecture:
        """What a HF config says. Raises ConversionError naming the field that is missing or not supported."""
        try:
            return self.read(hf_config)
        except KeyError as e:
            raise ConversionError(f"config.json: {e.args[0]} is missing; the {self.name} family needs it") from None


def read_config(model_path: str | Path) -> dict[str, Any]:
    """config.json of a HF directory. Raises CheckpointError naming the file."""
    path = Path(model_path) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError:
        raise CheckpointError(f"{path}: not found; model.path must be a Hugging Face model directory") from None
    except ValueError as e:
        raise CheckpointError(f"{path}: not valid JSON ({e}); copy the model directory again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds no model config; model.path must be a Hugging Face model directory")
    return config


def find_family(hf_config: Mapping[str, Any]) -> Family:
    """The family of a HF config, by its `architectures`. Raises ConversionError for an unknown one."""
    from tepo_megatron.weights.families import qwen3

    families = {"Qwen3ForCausalLM": qwen3.FAMILY}
    name = (hf_config.get("architectures") or ["(none)"])[0]
    if name not in families:
        raise ConversionError(f"config.json: architecture {name} is not supported; known: {', '.join(families)}")
    return families[name]
