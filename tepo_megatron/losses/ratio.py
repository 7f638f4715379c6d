"""Importance ratios pi_theta / pi_old, and corrections by the ratio pi_old / pi_rollout, per response row (_R).

A ratio is a function (log_ratio_R, segments, constant_factors) -> ratio_R, a `RatioFunction`:
    log_ratio_R: l - l_old in nats, the current minus the old log-prob of each response token
    segments: the sequence of each row, and sums over sequences
    constant_factors: whether all that multiplies the ratio (advantage, weight, mask, denominator) is the same on every token of
        a sequence, so that the sequence ratio may skip its collective in backward

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
from tepo_megatron.ops.context_parallel import Segments

# A larger log-ratio carries no information (e^20 = 5e8), and exp overflows fp32 at 88.
MAX_LOG_RATIO = 20.0

RatioFunction = Callable[[Tensor, Segments, bool], Tensor]


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """Return exp of the log-ratio clamped to +-20 nats. Outside that range the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_ratio(log_ratio_R: Tensor, segments: Segments, constant_factors: bool) -> Tensor:
    """Return r_t = exp(l_t - l_old_t), the token ratio of PPO (arXiv 1707.06347) and GRPO (arXiv 2402.03300). No collective."""
    return exp_clamped(log_ratio_R)


def sequence_ratio(log_ratio_R: Tensor, segments: Segments, constant_factors: bool) -> Tensor:
    """Return w_i = exp(sum_t (l_t - l_old_t) / |y_i|) for each row of sequence i: TEPO's sequence-level ratio.

    It is the geometric mean of the token ratios (Section 3.3.1; Algorithm 1, line 11; also GSPO, arXiv 2507.18071).


    Gradient: that of the formula. Unclipped and with a constant A it is dJ/dl_t = w_i A / D for every token t of the sequence,
    where D is the denominator of the aggregation. Line 21 of Algorithm 1 omits the sum over the |y_i| tokens whose loss
    contains w_i, and so prints a spurious 1/|y_i|.

    Collectives (context parallel): forward one all-reduce of G sums. Backward: none with `constant_factors`, else one
    all-reduce of G gradients. With constant factors the |y_i| loss terms that contain w_i are equal, and their sum cancels
    1/|y_i|. Each token then uses w_i = exp(sg[log w_i] + l_t - sg[l_t]), whose gradient needs no value from other ranks.
    """
    if constant_factors:
        log_w_R = segments.spread(segments.mean_detached(log_ratio_R))
        return exp_clamped(log_w_R + (log_ratio_R - log_ratio_R.detach()))
    return exp_clamped(segments.spread(segments.mean(log_ratio_R)))


def prefix_ratio(log_ratio_R: Tensor, segments: Segments, constant_factors: bool) -> Tensor:
    """Return r_t = exp(sum_{j <= t} (l_j - l_old_j) / t), the geometric mean of the token ratios up to t.

    The paper calls it Prefix Importance Sampling (Table 5).


    Gradient: that of the formula. Token j enters the ratio of every t >= j, with weight 1/t.
    Collectives (context parallel): one all-reduce of G x chunks sums in forward, one of the same size in backward. A sequence
    has 2 cp chunks, and one more where prompts are shared.
    """
    return exp_clamped(segments.running_mean(log_ratio_R))


def no_ratio(log_ratio_R: Tensor, segments: Segments, constant_factors: bool) -> Tensor:
    """Return 1: no importance sampling (GPG, arXiv 2504.02546). No collective, no gradient."""
    return torch.ones_like(log_ratio_R)


RATIOS: dict[str, RatioFunction] = {"token": token_ratio, "sequence": sequence_ratio, "prefix": prefix_ratio, "none": no_ratio}


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
