"""Define the dense Qwen2 and Qwen2.5 family: GQA with biases on q, k and v, SwiGLU, tied or untied embeddings."""

from tepo_megatron.models.families.family import Family
from tepo_megatron.models.families.tensors import DECODER, QKV_BIAS, swiglu

FAMILY = Family(
    name="qwen2",
    rows=DECODER + QKV_BIAS + swiglu(),
    qkv_bias=True,
    required={"use_sliding_window": (False,), "use_mrope": (False,)},
    no_effect=frozenset({"sliding_window", "max_window_layers"}),  # no effect without use_sliding_window
)
