"""Define the Qwen families with attention in all layers: Qwen2 and Qwen2.5, Qwen3, and Qwen3-MoE.

All have GQA and SwiGLU; the dense ones have tied or untied embeddings. Qwen2 has biases on q, k and v, Qwen3 RMS norms of each
head's q and k. Qwen3-MoE has Qwen3's attention, and experts in place of the feed-forward block in all or some layers.
"""

from collections.abc import Mapping
from typing import Any

from tepo_megatron.base.errors import ConversionError
from tepo_megatron.models.families.family import DECODER, QK_NORM, QKV_BIAS, Family, experts, positive, swiglu
from tepo_megatron.models.ops import Experts

QWEN2 = Family(
    name="qwen2",
    rows=DECODER + QKV_BIAS + swiglu(),
    qkv_bias=True,
    required={"use_sliding_window": (False,), "use_mrope": (False,)},
    no_effect=frozenset({"sliding_window", "max_window_layers"}),  # no effect without use_sliding_window
)


QWEN3 = Family(
    name="qwen3",
    rows=DECODER + QK_NORM + swiglu(),
    qk_norm=True,
    required={"attention_bias": (False,), "use_sliding_window": (False,)},
    no_effect=frozenset({"sliding_window", "max_window_layers"}),  # no effect without use_sliding_window
    defaults={"head_dim": 128},
)


def read_experts(hf: Mapping[str, Any]) -> Experts:
    """Read the mixture of experts from a HF config. transformers 5 writes `num_local_experts` in place of `num_experts`.

    Raises ConversionError when both are given and differ.
    """
    name = "num_local_experts" if "num_local_experts" in hf else "num_experts"
    number, step, dense = positive(hf, name), positive(hf, "decoder_sparse_step"), hf["mlp_only_layers"] or ()
    if hf.get("num_experts", number) != number:
        raise ConversionError(f"config.json: num_experts={hf['num_experts']} and num_local_experts={number} differ")
    return Experts(
        number=number,
        per_token=positive(hf, "num_experts_per_tok"),
        ffn_size=positive(hf, "moe_intermediate_size"),
        normalized=hf["norm_topk_prob"],
        sparse_layers=tuple(i for i in range(hf["num_hidden_layers"]) if (i + 1) % step == 0 and i not in dense),
    )


QWEN3_MOE = Family(
    name="qwen3_moe",
    rows=DECODER + QK_NORM + swiglu("dense") + experts("mlp", "gate_proj", "up_proj", "down_proj"),
    qk_norm=True,
    required={"attention_bias": (False,), "use_sliding_window": (False,)},
    no_effect=frozenset({
        "sliding_window", "max_window_layers",  # no effect without use_sliding_window
        "router_aux_loss_coef", "output_router_logits",  # they belong to a loss that is not added here
    }),
    mapped=frozenset({
        "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
        "decoder_sparse_step", "mlp_only_layers",
    }),
    defaults={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None},
    read_experts=read_experts,
)  # fmt: skip
