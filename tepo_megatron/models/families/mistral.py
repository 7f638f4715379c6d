"""Define the Mistral family (dense, without sliding window): GQA, SwiGLU."""

from tepo_megatron.models.families.family import Family
from tepo_megatron.models.families.tensors import DECODER, swiglu

FAMILY = Family(
    name="mistral", rows=DECODER + swiglu(), required={"sliding_window": (None,)}, defaults={"sliding_window": 4096}
)
