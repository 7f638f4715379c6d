"""The kernels of linear attention, and the layout of a packed microbatch that they share.

Suffixes and dimensions: _T packed tokens of all context-parallel (CP) ranks; D channels, H heads, K channels of queries and
keys, V channels of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tepo_megatron.actor.kernels import LinearChoice
from tepo_megatron.ops.context_parallel import zigzag_rows
from tepo_megatron.ops.gated_delta_rule import SequenceChunks, gated_delta_rule


def positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the position of each token in its sequence, int64 [T]."""
    return torch.cat([torch.arange(length) for length in (*lengths, 0)]).to(device)


def packed_convolution(x_TD: Tensor, weight_DW: Tensor, position_T: Tensor) -> Tensor:
    """Return SiLU of the depthwise causal convolution over packed sequences, each channel with its own W weights, [T, D].

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


_CHANNELS = 8  # causal-conv1d needs a multiple of this many channels where sequences are packed


@dataclass(frozen=True)
class LinearLayout:
    """The packed sequences of a microbatch, computed once for all its layers."""

    lengths: tuple[int, ...]  # tokens of each sequence over all CP ranks, padding included
    position_T: Tensor  # position of each token in its sequence
    chunks: SequenceChunks
    # Under CP, the place in the order of packing of each token of the ranks, one rank after another. None without CP.
    rows_T: Tensor | None

    @classmethod
    def of(cls, lengths: tuple[int, ...], cp: int, device: torch.device) -> LinearLayout:
        """Return the layout of sequences."""
        starts = torch.tensor([0, *lengths]).cumsum(0)
        rows = torch.cat([zigzag_rows(starts, cp, rank) for rank in range(cp)]).to(device) if cp > 1 else None
        return cls(lengths, positions(lengths, device), SequenceChunks.of(lengths, device), rows)

    @property
    def starts(self) -> Tensor:
        """Return the start of each sequence, and the number of tokens: int64 [G + 1] on the device."""
        return torch.tensor([0, *self.lengths], device=self.position_T.device).cumsum(0)


@dataclass(frozen=True)
class LinearKernels:
    """The implementations that a layer calls."""

    # (x [T, D], weights [D, width], layout) -> SiLU of the causal convolution [T, D]
    convolution: Callable[[Tensor, Tensor, LinearLayout], Tensor]
    # (q, k [T, H, K], v [T, H, V], log decays g, strengths beta [T, H], layout) -> [T, H, V]. Queries and keys are normalized,
    # and all but `v` are fp32.
    delta_rule: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, LinearLayout], Tensor]

    @classmethod
    def of(cls, choice: LinearChoice) -> LinearKernels:
        """Return the implementations that `kernels.choose_linear` names."""
        return cls(_CONVOLUTIONS[choice.convolution], _DELTA_RULES[choice.delta_rule])


def _torch_convolution(x_TD: Tensor, weight_DW: Tensor, layout: LinearLayout) -> Tensor:
    return packed_convolution(x_TD.float(), weight_DW.float(), layout.position_T)


def _cuda_convolution(x_TD: Tensor, weight_DW: Tensor, layout: LinearLayout) -> Tensor:
    """Call causal-conv1d, whose products are 16 bits and whose sums are fp32."""
    if x_TD.size(1) % _CHANNELS:
        return _torch_convolution(x_TD, weight_DW, layout)
    from causal_conv1d import causal_conv1d_fn

    lengths = torch.tensor(layout.lengths, device=x_TD.device)
    sequence = torch.arange(lengths.numel(), device=x_TD.device, dtype=torch.int32).repeat_interleave(lengths)
    channels_last = x_TD.contiguous()[None].transpose(1, 2)
    convolved: Tensor = causal_conv1d_fn(channels_last, weight_DW.contiguous(), seq_idx=sequence[None], activation="silu")
    return convolved.transpose(1, 2)[0]


def _torch_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: LinearLayout) -> Tensor:
    return gated_delta_rule(q, k, v.float(), g, beta, layout.chunks)


def _fla_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: LinearLayout) -> Tensor:
    """Call FLA's kernels, whose products are bf16 and whose states and decays are fp32."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    half = [x.bfloat16()[None] for x in (q, k, v)]
    out: Tensor = chunk_gated_delta_rule(*half, g=g[None], beta=beta[None], cu_seqlens=layout.starts)[0]
    return out[0]


_CONVOLUTIONS = {"torch": _torch_convolution, "causal_conv1d": _cuda_convolution}
_DELTA_RULES = {"torch": _torch_delta_rule, "fla": _fla_delta_rule}
