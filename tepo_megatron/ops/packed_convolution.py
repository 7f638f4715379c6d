"""Depthwise causal convolution over packed sequences.

Suffixes and dimensions: _T packed tokens, D channels, W tokens that the convolution covers.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the position of each token in its sequence, int64 [T]."""
    return torch.cat([torch.arange(length) for length in (*lengths, 0)]).to(device)


def packed_convolution(x_TD: Tensor, weight_DW: Tensor, position_T: Tensor) -> Tensor:
    """Return SiLU of the causal convolution of each channel with its own weights, [T, D].

    The last weight belongs to the token itself. Tokens before the start of a sequence count as 0. Gradients: to `x_TD` and
    `weight_DW`, by autograd; none crosses the border of two sequences. It is computed in the dtype of the inputs.

    Args:
        x_TD: Channels of each token.
        weight_DW: Weights of each channel.
        position_T: int64, position of each token in its sequence (see `positions`).
    """
    weights = weight_DW.unbind(1)
    y = x_TD * weights[-1]
    for back in range(1, min(len(weights), x_TD.size(0))):
        inside = (position_T[back:] >= back)[:, None]
        y = y + F.pad(x_TD[:-back] * inside * weights[-1 - back], (0, 0, back, 0))
    return F.silu(y)
