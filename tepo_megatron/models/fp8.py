"""Quantize weights to blockwise FP8: e4m3 values with one fp32 scale for each block of 128 x 128.

DeepSeek-V3 publishes its weights in this format (arXiv 2412.19437, section 3.3); vLLM and SGLang load it. A weight [n, k]
becomes `weight` [n, k] in e4m3 and `weight_scale_inv` [ceil(n / 128), ceil(k / 128)] in fp32, with w ~ weight *
weight_scale_inv of its block. e4m3 has three mantissa bits: the relative error of a value is at most 2^-4 (half a unit in the
last place). Below the smallest normal value, 2^-6, the error is at most 2^-10 of the block's scale.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.base.errors import ConversionError
from tepo_megatron.models.ops import FusedHeads, Op, Replicated, Vocabulary

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
MAX = 448.0  # the largest value of e4m3, which has no infinity
# Scales stay normal numbers, since subnormal ones have too few bits to divide by. Blocks below 448 times this lose precision.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight [n, k] of bf16, fp16 or fp32.

    On the meta device only shapes are computed. A block of zeros gets the scale 1.

    Returns:
        e4m3 values [n, k], and fp32 scales [ceil(n / 128), ceil(k / 128)].

    Raises:
        ConversionError: a value is not finite.
    """
    rows, columns = (-(-n // BLOCK) for n in weight.shape)
    if weight.is_meta:
        return weight.to(torch.float8_e4m3fn), torch.empty(rows, columns, device=weight.device)
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.ones(rows, columns, device=weight.device)
    for i in range(rows):  # one row of blocks at a time bounds the memory of the fp32 copy
        band = slice(i * BLOCK, (i + 1) * BLOCK)
        part = weight[band].float()
        maximum = torch.nn.functional.pad(part.abs().amax(0), (0, columns * BLOCK - part.size(1))).view(columns, BLOCK).amax(1)
        if not bool(torch.isfinite(maximum).all()):
            raise ConversionError("a weight that is infinite or not a number has no place in FP8; the model has diverged")
        scales[i] = torch.where(maximum > 0, (maximum / MAX).clamp(min=_SMALLEST_SCALE), 1.0)
        each = scales[i].repeat_interleave(BLOCK)[: part.size(1)]
        quantized[band] = (part / each).clamp(-MAX, MAX).to(torch.float8_e4m3fn)
    return quantized, scales


def is_quantized(op: Op, name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is quantized: true for the weights of the decoder's linear layers.

    It is false for the vocabulary's matrices, routers and norms (which are not split over ranks), biases, and what the gated
    delta rule computes decays from: `A_log`, `dt_bias`, the convolution, and the projections that `FusedHeads` names.
    """
    if isinstance(op, FusedHeads) and name.endswith(op.unquantized):
        return False
    return tensor.ndim == 2 and not isinstance(op, Vocabulary | Replicated)


def parts(op: Op, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors by which an FP8 model represents a HF tensor: quantized weight and scales, or the tensor itself.
    Raises ConversionError if a value to be quantized is not finite.
    """
    if not is_quantized(op, name, tensor):
        return [(name, tensor)]
    return list(zip((name, name + SCALE_SUFFIX), quantize(tensor), strict=True))


def config(whole_modules: Sequence[str]) -> dict[str, Any]:
    """Return `quantization_config` of config.json. whole_modules: those whose weights are not in FP8."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(whole_modules),
    }
