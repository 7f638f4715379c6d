"""Megatron's fused weight gradient without Apex: each product adds straight into the fp32 `main_grad`.

Megatron's linear layers call Apex's extension `fused_weight_gradient_mlp_cuda` for that. Where Apex is not installed, PyTorch's
own products do the same (`ops/output_layer.py`), on a GPU and on a CPU. Transformer Engine's layers have a fusion of their own;
the output layer is Megatron's in any case, and refuses the fusion without the extension.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import layers
from torch import Tensor

from tepo_megatron.ops.output_layer import add_product


class WeightGradient:
    """The function of Apex's extension that Megatron calls where gradients are reduced in fp32, as they always are here."""

    @staticmethod
    def wgrad_gemm_accum_fp32(hidden: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
        """Add gradient [T, V] transposed @ hidden [T, H] to `main_grad` [V, H], which is fp32."""
        add_product(main_grad, gradient, hidden)


def lend_to_megatron() -> None:
    """Be what `TransformerConfig.gradient_accumulation_fusion` calls, unless Apex's extension is installed."""
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = WeightGradient
        layers._grad_accum_fusion_available = True
