"""The values behind a blockwise quantized weight, for tests that compare with the weight itself."""

from torch import Tensor

from tepo_megatron.models.fp8 import BLOCK


def dequantize(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """Return the values that an engine computes with, fp32 [n, k]."""
    each = scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * each[: weight.size(0), : weight.size(1)]
