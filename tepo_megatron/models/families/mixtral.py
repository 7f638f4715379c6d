"""Define the Mixtral family: Mistral's attention, and experts in all layers; the chosen experts' weights add up to 1."""

from collections.abc import Mapping
from typing import Any

from tepo_megatron.models.families.family import Family, positive
from tepo_megatron.models.families.tensors import DECODER, experts
from tepo_megatron.models.ops import Experts


def read_experts(hf: Mapping[str, Any]) -> Experts:
    """Read the mixture of experts from a HF config; all layers are sparse."""
    return Experts(
        number=positive(hf, "num_local_experts"),
        per_token=positive(hf, "num_experts_per_tok"),
        ffn_size=positive(hf, "intermediate_size"),
        normalized=True,
        sparse_layers=tuple(range(hf["num_hidden_layers"])),
    )


FAMILY = Family(
    name="mixtral",
    rows=DECODER + experts("block_sparse_moe", "w1", "w3", "w2"),
    required={"sliding_window": (None,), "router_jitter_noise": (0,)},
    no_effect=frozenset({"router_aux_loss_coef", "output_router_logits"}),  # they belong to a loss that is not added here
    mapped=frozenset({"num_local_experts", "num_experts_per_tok"}),
    read_experts=read_experts,
)
