"""Define the families of Llama's kind: Llama itself (2 and 3.x), Mistral (dense, without sliding window) and Mixtral.

All have GQA and SwiGLU. Llama has RoPE with or without scaling, and tied or untied embeddings. Mixtral has experts in all
layers; the chosen experts' weights add up to 1.
"""

from collections.abc import Mapping
from typing import Any

from tepo_megatron.models.families.family import DECODER, Family, experts, positive, swiglu
from tepo_megatron.models.ops import Experts

LLAMA = Family(
    name="llama",
    rows=DECODER + swiglu(),
    required={"attention_bias": (False,), "mlp_bias": (False,)},
    no_effect=frozenset({"pretraining_tp"}),  # it splits matrix products; the results are equal up to rounding
    # Llama 2 files omit theta, Llama 1 files the number of key-value heads (None: the number of heads)
    default_theta=10000.0,
    defaults={"num_key_value_heads": None},
    ignored_tensors=r"\.rotary_emb\.inv_freq$",
)


MISTRAL = Family(
    name="mistral", rows=DECODER + swiglu(), required={"sliding_window": (None,)}, defaults={"sliding_window": 4096}
)


def read_experts(hf: Mapping[str, Any]) -> Experts:
    """Read the mixture of experts from a HF config; all layers are sparse."""
    return Experts(
        number=positive(hf, "num_local_experts"),
        per_token=positive(hf, "num_experts_per_tok"),
        ffn_size=positive(hf, "intermediate_size"),
        normalized=True,
        sparse_layers=tuple(range(hf["num_hidden_layers"])),
    )


MIXTRAL = Family(
    name="mixtral",
    rows=DECODER + experts("block_sparse_moe", "w1", "w3", "w2"),
    required={"sliding_window": (None,), "router_jitter_noise": (0,)},
    no_effect=frozenset({"router_aux_loss_coef", "output_router_logits"}),  # they belong to a loss that is not added here
    mapped=frozenset({"num_local_experts", "num_experts_per_tok"}),
    read_experts=read_experts,
)
