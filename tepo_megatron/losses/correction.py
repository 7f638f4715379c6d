"""Corrections of the rollout/train mismatch, per response row (_R): truncation, masks of sequences and IcePop.

The inference engine and the actor run the same weights with different kernels, so the tokens are samples of pi_rollout, not of
pi_old. A correction is a function (mismatch_R, segments, part) -> weight_R, a `CorrectionFunction`:
    mismatch_R: l_old - l_rollout in nats
    segments: the sequence of each row, and sums over sequences
    part: the correction's fields in the objective: bounds on the ratio pi_old / pi_rollout

The weight has no gradient and multiplies the surrogate alone. The denominators of the loss do not change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config.objective import GeometricMask, IcePop, SequenceMis, Tis
from tepo_megatron.losses.ratio import exp_clamped
from tepo_megatron.ops.segments import Segments

CorrectionFunction = Callable[[Tensor, Segments, Any], Tensor]


@dataclass(frozen=True)
class Correction:
    """An entry of `CORRECTIONS`. `constant`: whether the weight is the same on every token of a sequence."""

    weight: CorrectionFunction
    constant: bool = False


def truncated(mismatch_R: Tensor, segments: Segments, part: Tis) -> Tensor:
    """Return min(pi_old / pi_rollout, high), truncated importance sampling per token (TIS). No collective.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """
    return exp_clamped(mismatch_R).clamp(max=part.high)


def sequence_mis(mismatch_R: Tensor, segments: Segments, part: SequenceMis) -> Tensor:
    """Return rho(y) 1[rho(y) <= high] with rho(y) = pi_old(y) / pi_rollout(y), the ratio of the whole sequence (MIS).

    Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".


    Collectives (context parallel): one all-reduce of G sums.
    """
    ratio_G = exp_clamped(segments.sum_detached(mismatch_R))
    return segments.spread(torch.where(ratio_G <= part.high, ratio_G, 0.0))


def geometric_mask(mismatch_R: Tensor, segments: Segments, part: GeometricMask) -> Tensor:
    """Return 1 on sequences whose geometric-mean ratio pi_old / pi_rollout lies in [low, high], 0 on the others.


    Collectives (context parallel): one all-reduce of G sums.
    """
    ratio_G = exp_clamped(segments.mean_detached(mismatch_R))
    return segments.spread(((ratio_G >= part.low) & (ratio_G <= part.high)).to(mismatch_R.dtype))


def icepop(mismatch_R: Tensor, segments: Segments, part: IcePop) -> Tensor:
    """Return pi_old / pi_rollout where it lies in [low, high], else 0 (IcePop, arXiv 2510.18855). No collective."""
    ratio_R = exp_clamped(mismatch_R)
    return torch.where((ratio_R >= part.low) & (ratio_R <= part.high), ratio_R, 0.0)


# by the `type` of the part
CORRECTIONS: dict[str, Correction | None] = {
    "none": None,
    "tis": Correction(truncated),
    "sequence_mis": Correction(sequence_mis, constant=True),
    "geometric_mask": Correction(geometric_mask, constant=True),
    "icepop": Correction(icepop),
}
