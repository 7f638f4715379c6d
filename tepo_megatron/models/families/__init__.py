"""Define model families as tables that loading, export and weight sync all use, and find that of a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import CheckpointError, ConversionError
from tepo_megatron.models.families import llama, qwen, qwen3_5
from tepo_megatron.models.families.family import Family, WeightMapping

__all__ = ["FAMILIES", "Family", "WeightMapping", "check_tokenizer", "find_family", "read_config"]

FAMILIES: Mapping[str, Family] = {
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen3ForCausalLM": qwen.QWEN3,
    "Qwen3MoeForCausalLM": qwen.QWEN3_MOE,
    "Qwen3_5ForCausalLM": qwen3_5.FAMILY,
    "Qwen3_5ForConditionalGeneration": qwen3_5.MULTIMODAL,
    "LlamaForCausalLM": llama.LLAMA,
    "MistralForCausalLM": llama.MISTRAL,
    "MixtralForCausalLM": llama.MIXTRAL,
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


def check_tokenizer(model_path: str | Path, vocab_size: int) -> None:
    """Check that every id of tokenizer.json has a row in the embedding. Do nothing without a tokenizer.json.

    Raises:
        ConversionError: an id is too large; the message names the token with the largest id.
        CheckpointError: tokenizer.json cannot be read.
    """
    path = Path(model_path) / "tokenizer.json"
    if not path.exists():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocab = content["model"].get("vocab", {})
        # a unigram model lists [token, score] pairs, the others map tokens to ids
        ids = vocab if isinstance(vocab, dict) else {str(entry[0]): i for i, entry in enumerate(vocab)}
        ids = {**ids, **{t["content"]: t["id"] for t in content.get("added_tokens") or ()}}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path}: not a tokenizer ({e!r}); copy the file again") from None
    token = max(ids, key=ids.__getitem__, default=None)
    if token is not None and ids[token] >= vocab_size:
        raise ConversionError(
            f"{path}: token {token!r} has id {ids[token]}, but config.json's vocab_size={vocab_size} leaves the embedding no "
            "row for it; use the tokenizer that belongs to the model, or resize the embedding"
        )
