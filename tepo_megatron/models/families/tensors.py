"""Define the rows of the tensor table that families share."""

from typing import Literal

from tepo_megatron.models.families.family import WeightMapping
from tepo_megatron.models.ops import FusedGateUp, FusedQKV, Replicated, Split, Vocabulary

_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."


def _qkv(part: str) -> WeightMapping:
    hf = tuple(_HF + f"self_attn.{x}_proj.{part}" for x in "qkv")
    return WeightMapping(_MEGATRON + f"self_attention.linear_qkv.{part}", hf, FusedQKV())


# Embeddings and norms
OUTER = (
    WeightMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary()),
    WeightMapping("output_layer.weight", ("lm_head.weight",), Vocabulary()),
    WeightMapping("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
    WeightMapping(_MEGATRON + "input_layernorm.weight", (_HF + "input_layernorm.weight",), Replicated()),
    WeightMapping(_MEGATRON + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",), Replicated()),
)

# With the projections of attention
DECODER = (
    *OUTER,
    _qkv("weight"),
    WeightMapping(_MEGATRON + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), Split(dim=1)),
)

QKV_BIAS = (_qkv("bias"),)

QK_NORM = (
    WeightMapping(_MEGATRON + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",), Replicated()),
    WeightMapping(_MEGATRON + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",), Replicated()),
)


def swiglu(layers: Literal["all", "dense"] = "all") -> tuple[WeightMapping, ...]:
    """Return the rows of a dense SwiGLU feed-forward block."""
    gate_up = tuple(_HF + f"mlp.{x}_proj.weight" for x in ("gate", "up"))
    return (
        WeightMapping(_MEGATRON + "mlp.linear_fc1.weight", gate_up, FusedGateUp(), layers),
        WeightMapping(_MEGATRON + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), Split(dim=1), layers),
    )


def experts(block: str, gate: str, up: str, down: str) -> tuple[WeightMapping, ...]:
    """Return the rows of a router and SwiGLU experts."""
    of_expert = _HF + block + ".experts.{expert}."
    mine, gate_up = _MEGATRON + "mlp.experts.{expert}.", tuple(of_expert + f"{x}.weight" for x in (gate, up))
    return (
        WeightMapping(_MEGATRON + "mlp.router.weight", (_HF + block + ".gate.weight",), Replicated(), "sparse"),
        WeightMapping(mine + "linear_fc1.weight", gate_up, FusedGateUp(), "sparse"),
        WeightMapping(mine + "linear_fc2.weight", (of_expert + f"{down}.weight",), Split(dim=1), "sparse"),
    )
