"""Llama 2 and 3.x: GQA, SwiGLU, RoPE with or without scaling, tied or untied embeddings."""

from tepo_megatron.weights.families.family import Family
from tepo_megatron.weights.families.tensors import DECODER, swiglu

FAMILY = Family(
    name="llama",
    rows=DECODER + swiglu(),
    required={"attention_bias": (False,), "mlp_bias": (False,)},
    no_effect=frozenset({"pretraining_tp"}),  # how a sum was once split: the same up to rounding
    # Llama 2 leaves out theta, Llama 1 the number of key-value heads (None: as many as heads)
    default_theta=10000.0,
    defaults={"num_key_value_heads": None},
    ignored_tensors=r"\.rotary_emb\.inv_freq$",
)
