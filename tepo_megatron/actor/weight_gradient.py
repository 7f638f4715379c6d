"""Megatron's fused weight gradient without Apex: each product is added directly to the fp32 `main_grad`.

Megatron's linear layers call Apex's extension `fused_weight_gradient_mlp_cuda` for that. Where Apex is not installed, PyTorch's
own products do the same (`ops/output_layer.py`), on a GPU and on a CPU. Transformer Engine's layers have their own fusion. The
output layer is Megatron's in any case, and Megatron refuses the fusion without the extension.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import layers
from torch import Tensor

from tepo_megatron.ops.output_layer import add_product


class WeightGradient:
    """A replacement for Apex's extension, with the one function that Megatron calls when gradients are reduced in fp32."""

    @staticmethod
    def wgrad_gemm_accum_fp32(hidden: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
        """Add gradient.T @ hidden to `main_grad` in place.

        Args:
            hidden: [T, H], input of the linear layer.
            gradient: [T, V], gradient of its output.
            main_grad: fp32 [V, H].
        """
        add_product(main_grad, gradient, hidden)


def install_in_megatron() -> None:
    """Install `WeightGradient` as what `TransformerConfig.gradient_accumulation_fusion` calls, unless Apex's is installed."""
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = WeightGradient
        layers._grad_accum_fusion_available = True
