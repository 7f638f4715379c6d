"""Define each model family in one file, as tables that loading, export and weight sync all use."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import CheckpointError, ConversionError
from tepo_megatron.models.families import llama, mistral, mixtral, qwen2, qwen3, qwen3_5, qwen3_moe
from tepo_megatron.models.families.family import Family, WeightMapping
from tepo_megatron.models.families.tokens import check_tokenizer

__all__ = ["FAMILIES", "Family", "WeightMapping", "check_tokenizer", "find_family", "read_config"]

FAMILIES: Mapping[str, Family] = {
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
    "Qwen3_5ForCausalLM": qwen3_5.FAMILY,
    "Qwen3_5ForConditionalGeneration": qwen3_5.MULTIMODAL,
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
}


def read_config(model_path: str | Path) -> dict[str, Any]:
    """Return config.json of a HF directory. Raises CheckpointError, naming the file, when it is missing or no model config."""
    path = Path(model_path) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError:
        raise CheckpointError(
            f"{path}: not found; model.path must be a Hugging Face model directory (`hf download REPO --local-dir DIR` "
            "fetches one)"
        ) from None
    except ValueError as e:
        raise CheckpointError(f"{path}: not valid JSON ({e}); copy the model directory again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds no model config; model.path must be a Hugging Face model directory")
    return config


def find_family(hf_config: Mapping[str, Any]) -> Family:
    """Return the family of a HF config, by its `architectures`. Raises ConversionError for an unknown one."""
    name = (hf_config.get("architectures") or ["(none)"])[0]
    if name not in FAMILIES:
        raise ConversionError(f"config.json: architecture {name} is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]
