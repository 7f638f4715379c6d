"""Define the dense Qwen3 family: GQA with per-head RMS norms of q and k, SwiGLU, tied or untied embeddings."""

from tepo_megatron.models.families.family import Family
from tepo_megatron.models.families.tensors import DECODER, QK_NORM, swiglu

FAMILY = Family(
    name="qwen3",
    rows=DECODER + QK_NORM + swiglu(),
    qk_norm=True,
    required={"attention_bias": (False,), "use_sliding_window": (False,)},
    no_effect=frozenset({"sliding_window", "max_window_layers"}),  # no effect without use_sliding_window
    defaults={"head_dim": 128},
)
