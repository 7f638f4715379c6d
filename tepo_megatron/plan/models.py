"""Sizes of models that recipes and published figures name, as in their `config.json`, for machines without these models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tepo_megatron.errors import CheckpointError, ConfigError
from tepo_megatron.weights.families import Family, find_family, read_config
from tepo_megatron.weights.ops import Architecture

# names of the sizes in a config.json
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def _dense(architecture: str, *sizes: int, **more: Any) -> dict[str, Any]:
    fields = dict(zip(_FIELDS, sizes, strict=True))
    return {"architectures": [architecture], **fields, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **more}


def _hybrid(*sizes: int, value_heads: int) -> dict[str, Any]:
    """Return the config of a Qwen3.5, whose files hold a vision tower next to the text model."""
    text = _dense("Qwen3_5ForCausalLM", *sizes, head_dim=256, linear_num_value_heads=value_heads)
    return {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}


_QWEN2, _QWEN3, _LLAMA = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"
# directory name of the Hugging Face repository -> its config.json, without keys that do not affect sizes
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-7B": _dense(_QWEN2, 3584, 18944, 28, 28, 4, 152064, 131072),
    "DeepSeek-R1-Distill-Qwen-7B": _dense(_QWEN2, 3584, 18944, 28, 28, 4, 152064, 131072),
    "Qwen3-14B": _dense(_QWEN3, 5120, 17408, 40, 40, 8, 151936, 40960, head_dim=128),
    "Qwen3-32B": _dense(_QWEN3, 5120, 25600, 64, 64, 8, 151936, 40960, head_dim=128),
    "DeepSeek-R1-Distill-Llama-8B": _dense(_LLAMA, 4096, 14336, 32, 32, 8, 128256, 131072),
    "Llama-3.1-8B": _dense(_LLAMA, 4096, 14336, 32, 32, 8, 128256, 131072),
    "Llama-3.1-70B": _dense(_LLAMA, 8192, 28672, 80, 64, 8, 128256, 131072),
    "Mistral-7B-Instruct-v0.2": _dense("MistralForCausalLM", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=None),
    "Qwen3-30B-A3B": _dense(
        "Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, 151936, 40960,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    # the defaults of transformers 5.19 (its docstring: "Qwen3.5-9B style"), and the model card of Qwen/Qwen3.5-27B with the
    # config.json that repositories quote; every fourth layer has attention
    "Qwen3.5-9B": _hybrid(4096, 12288, 32, 16, 4, 248320, 262144, value_heads=32),
    "Qwen3.5-27B": _hybrid(5120, 17408, 64, 24, 4, 248320, 262144, value_heads=48),
}  # fmt: skip


def _without_rotary_frequencies(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    return {k: v for k, v in hf.items() if k not in ("rope_scaling", "rope_parameters")} | {"rope_theta": 1e4}


def read_model(path: str | Path) -> tuple[Family, Architecture]:
    """Return family and sizes of `model.path`, from its config.json if present, else from `KNOWN` by the directory's name.

    Rotary frequencies do not affect sizes and are left out.

    Raises:
        ConfigError: The model is neither here nor known. Errors of the family's reader pass through.
    """
    try:
        hf: Mapping[str, Any] = read_config(path)
    except CheckpointError:
        name = Path(path).name
        if (Path(path) / "config.json").exists():
            raise
        if name not in KNOWN:
            raise ConfigError(
                f"model.path={path}: config.json is not there, and {name} is none of the models whose sizes are known: "
                f"{', '.join(KNOWN)}; copy that file to {path}/"
            ) from None
        hf = KNOWN[name]
    family = find_family(hf)
    field = family.text_config
    hf = _without_rotary_frequencies(hf) if field is None else {**hf, field: _without_rotary_frequencies(hf[field])}
    return family, family.architecture(hf)
