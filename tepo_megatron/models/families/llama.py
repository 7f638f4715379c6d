"""Define the Llama family (2 and 3.x): GQA, SwiGLU, RoPE with or without scaling, tied or untied embeddings."""

from tepo_megatron.models.families.family import Family
from tepo_megatron.models.families.tensors import DECODER, swiglu

FAMILY = Family(
    name="llama",
    rows=DECODER + swiglu(),
    required={"attention_bias": (False,), "mlp_bias": (False,)},
    no_effect=frozenset({"pretraining_tp"}),  # it splits matrix products; the results are equal up to rounding
    # Llama 2 files omit theta, Llama 1 files the number of key-value heads (None: the number of heads)
    default_theta=10000.0,
    defaults={"num_key_value_heads": None},
    ignored_tensors=r"\.rotary_emb\.inv_freq$",
)
