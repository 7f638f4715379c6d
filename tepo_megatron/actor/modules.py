"""RMS norms for Megatron's layer specs where Transformer Engine's are not used."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """PyTorch's RMS norm with the constructor that Megatron's layer specs call.

    Megatron's own fallback (`WrappedTorchNorm`, 0.16) refuses sequence parallelism. Under sequence parallelism each rank
    normalizes its part of the tokens, so the weight's gradient must be summed over tp. Megatron does that for parameters marked
    `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


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
