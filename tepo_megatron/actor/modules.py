"""Modules that Megatron-Core takes from Transformer Engine or Apex, for where neither is installed."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """RMS norm in the form that Megatron's layer specs construct.

    Megatron's own fallback (`WrappedTorchNorm`, 0.16) refuses sequence parallelism. Under it each rank norms its part of the
    tokens, so the weight's gradient must be summed over tp, which Megatron does for parameters marked `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class ApexRMSNorm(torch.nn.Module):
    """The same with Apex's kernel, which keeps the input for backward and computes in fp32, too."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.shape, self.eps = (hidden_size,), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] in the model's dtype -> the same."""
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        return fused_rms_norm_affine(x, self.weight, self.shape, self.eps)
