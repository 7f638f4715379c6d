"""Corrections of the mismatch between the engine that sampled and the actor that learns, per response row (_R).

Both run the same weights with other kernels, so the tokens come from pi_rollout, not from pi_old. A correction is a weight
c_R = f(l_old - l_rollout), without gradient, on the surrogate alone; the denominators stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.losses.ratio import exp_clamped
from tepo_megatron.ops.segments import Segments

CorrectionFunction = Callable[[Tensor, Segments, float, float], Tensor]


@dataclass(frozen=True)
class Correction:
    """weight: (l_old - l_rollout of each row, segments, low, high) -> c_R; low, high: its bounds unless others are given (low
    None: it has none); constant: whether c_R is the same on every token of a sequence.
    """

    weight: CorrectionFunction
    low: float | None
    high: float
    constant: bool = False


def truncated(mismatch_R: Tensor, segments: Segments, low: float, high: float) -> Tensor:
    """min(pi_old / pi_rollout, high): truncated importance sampling per token (Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training"). No collective.
    """
    return exp_clamped(mismatch_R).clamp(max=high)


def sequence_masked(mismatch_R: Tensor, segments: Segments, low: float, high: float) -> Tensor:
    """1 on sequences whose geometric-mean ratio pi_old / pi_rollout lies in [low, high], 0 on the others.

    Collectives (context parallel): one all-reduce of G sums.
    """
    ratio_G = exp_clamped(segments.mean_detached(mismatch_R))
    return segments.spread(((ratio_G >= low) & (ratio_G <= high)).to(mismatch_R.dtype))


def icepop(mismatch_R: Tensor, segments: Segments, low: float, high: float) -> Tensor:
    """pi_old / pi_rollout where it lies in [low, high], else 0 (IcePop, arXiv 2510.18855). No collective."""
    ratio_R = exp_clamped(mismatch_R)
    return torch.where((ratio_R >= low) & (ratio_R <= high), ratio_R, 0.0)


# The cap 2 is a common one; the other bounds are our choice (for `mis`: a mean of 0.01 nats per token).
CORRECTIONS: dict[str, Correction | None] = {
    "none": None,
    "tis": Correction(truncated, low=None, high=2.0),
    "mis": Correction(sequence_masked, low=0.99, high=1.01, constant=True),
    "icepop": Correction(icepop, low=0.5, high=5.0),
}
