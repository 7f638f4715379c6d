"""Check that a model directory and a run fit its config.json; loading, conversion, preflight and doctor share these checks."""

from collections.abc import Mapping
from typing import Any

import torch

from tepo_megatron.base.errors import ConfigError, ConversionError
from tepo_megatron.models.families.family import Family
from tepo_megatron.models.hf_io import HfReader
from tepo_megatron.models.ops import Architecture


def check_tensors(reader: HfReader, family: Family, arch: Architecture) -> None:
    """Raise ConversionError if a tensor is missing or left over, or if a head contradicts tied embeddings."""
    expected = family.tensor_names(arch)
    if missing := expected - reader.names():
        raise ConversionError(
            f"{reader.path}: tensor {min(missing)} (and {len(missing) - 1} more) is missing; the weights do not belong to this "
            "config.json, or a file was not copied"
        )
    extra = {n for n in reader.names() - expected if not family.ignores(n)}
    if arch.tied_embeddings and "lm_head.weight" in extra:
        if not torch.equal(reader.get("lm_head.weight"), reader.get(family.embedding)):
            raise ConversionError(
                f"{reader.path}: lm_head.weight differs from {family.embedding}, but config.json has "
                "tie_word_embeddings=true; set it to false, or remove lm_head.weight"
            )
        extra.remove("lm_head.weight")
    if extra:
        raise ConversionError(
            f"{reader.path}: tensor {min(extra)} (and {len(extra) - 1} more) is in no row of family {family.name}; the weights "
            "do not belong to this config.json"
        )


def check_positions(family: Family, hf_config: Mapping[str, Any], lengths: Mapping[str, int]) -> None:
    """Raise ConfigError if a length, by the keys that add up to it, exceeds the positions of the model.

    YaRN and its kind scale the positions by their factor, as vLLM and SGLang count; Llama 3's are scaled already.
    """
    arch = family.architecture(hf_config)
    text = hf_config.get(family.text_config) if family.text_config is not None else hf_config
    rope = (text or {}).get("rope_parameters") or (text or {}).get("rope_scaling") or {}
    limit, kind = arch.max_positions, rope.get("rope_type", rope.get("type"))
    if kind in ("yarn", "linear", "dynamic"):
        original = rope.get("original_max_position_embeddings") or arch.max_positions
        limit = max(limit, int(original * float(rope.get("factor") or 1)))
    for keys, length in lengths.items():
        if length > limit:
            raise ConfigError(f"{keys} = {length} tokens, and the model has max_position_embeddings={limit}; lower them")
