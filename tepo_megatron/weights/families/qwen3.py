"""Qwen3, dense: GQA with per-head RMS norms of q and k, SwiGLU, tied or untied embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tepo_megatron.errors import ConversionError
from tepo_megatron.weights.families import Family, Row
from tepo_megatron.weights.ops import Architecture, FusedGateUp, FusedQKV, Replicated, Split, Vocabulary

# Fields that change the computation, with the only value that this family's Megatron model computes.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "rope_scaling": None,
}


def architecture(hf: Mapping[str, Any]) -> Architecture:
    """Read a Qwen3 config.json. Raises ConversionError naming the field that is not supported."""
    for field, value in _REQUIRED.items():
        if hf.get(field, value) != value:
            raise ConversionError(f"config.json: {field}={hf[field]!r} is not supported for Qwen3; only {value!r} is")
    if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
        raise ConversionError("config.json: layer_types holds others than full_attention, which is not supported for Qwen3")
    return Architecture(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_size=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        vocab_size=hf["vocab_size"],
        max_positions=hf["max_position_embeddings"],
        norm_eps=hf["rms_norm_eps"],
        rotary_base=_rotary_base(hf),
        tied_embeddings=hf.get("tie_word_embeddings", False),
        qk_norm=True,
    )


def _rotary_base(hf: Mapping[str, Any]) -> float:
    """transformers 5 keeps theta inside `rope_parameters`; earlier files have `rope_theta` at the top."""
    rope = hf.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ConversionError(f"config.json: rope_parameters.rope_type={rope['rope_type']!r} is not supported for Qwen3")
    theta = rope.get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise ConversionError("config.json: neither rope_theta nor rope_parameters.rope_theta is given")
    return float(theta)


_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

FAMILY = Family(
    name="qwen3",
    read=architecture,
    rows=(
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary()),
        Row("output_layer.weight", ("lm_head.weight",), Vocabulary()),
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
        Row(_MEGATRON + "input_layernorm.weight", (_HF + "input_layernorm.weight",), Replicated()),
        Row(
            _MEGATRON + "self_attention.linear_qkv.weight",
            tuple(_HF + f"self_attn.{x}_proj.weight" for x in "qkv"),
            FusedQKV(),
        ),
        Row(_MEGATRON + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",), Replicated()),
        Row(_MEGATRON + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",), Replicated()),
        Row(_MEGATRON + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), Split(dim=1)),
        Row(_MEGATRON + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",), Replicated()),
        Row(
            _MEGATRON + "mlp.linear_fc1.weight",
            tuple(_HF + f"mlp.{x}_proj.weight" for x in ("gate", "up")),
            FusedGateUp(),
        ),
        Row(_MEGATRON + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), Split(dim=1)),
    ),
)
