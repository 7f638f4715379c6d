"""RMS norms and the fused weight gradient of Megatron's layers, where Transformer Engine's or Apex's are not used."""

from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from tepo_megatron.ops.output_layer import add_product


class RMSNorm(torch.nn.RMSNorm):
    """PyTorch's RMS norm with the constructor that Megatron's layer specs call.

    Megatron's own fallback (`WrappedTorchNorm`, 0.16) refuses sequence parallelism. Under sequence parallelism each rank
    normalizes its part of the tokens, so the weight's gradient must be summed over tp. Megatron does that for parameters marked
    `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class ZeroCenteredRMSNorm(RMSNorm):
    """RMS norm that multiplies by 1 + w, in fp32: rounding 1 + w to bf16 would lose the low bits of a small w."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized tensor: [..., hidden_size] in the model's dtype -> the same shape and dtype."""
        weight = 1 + self.weight.float()
        return torch.nn.functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


class ApexRMSNorm(torch.nn.Module):
    """RMS norm with Apex's kernel. Like PyTorch's it saves the input for backward and computes in fp32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.shape, self.eps = (hidden_size,), eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized tensor: [..., hidden_size] in the model's dtype -> the same shape and dtype."""
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        return fused_rms_norm_affine(x, self.weight, self.shape, self.eps)


class WeightGradient:
    """A replacement for Apex's extension, with the one function that Megatron calls when gradients are reduced in fp32.

    Megatron's linear layers call Apex's extension `fused_weight_gradient_mlp_cuda` for that. Where Apex is not installed,
    PyTorch's own products do the same (`ops/output_layer.py`), on a GPU and on a CPU. Transformer Engine's layers have their
    own fusion. The output layer is Megatron's in any case, and Megatron refuses the fusion without the extension.
    """

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
