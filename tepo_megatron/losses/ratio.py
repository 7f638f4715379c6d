"""Importance ratios pi_theta / pi_old, per response row (_R).

A ratio is a function (log_ratio_R, segments, constant_factors) -> ratio_R. `constant_factors` says that whatever multiplies
the ratio (advantage, weight, mask, denominator) is the same on every token of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tepo_megatron.ops.segments import Segments

# exp of more than this says nothing (e^20 = 5e8), and fp32 overflows at 88.
MAX_LOG_RATIO = 20.0

RatioFunction = Callable[[Tensor, Segments, bool], Tensor]


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-20 nats; outside, the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_ratio(log_ratio_R: Tensor, segments: Segments, constant_factors: bool) -> Tensor:
    """r_t = exp(l_t - l_old_t). PPO (arXiv 1707.06347), GRPO (arXiv 2402.03300). No collective."""
    return exp_clamped(log_ratio_R)


def sequence_ratio(log_ratio_R: Tensor, segments: Segments, constant_factors: bool) -> Tensor:
    """w_i = exp(sum_t (l_t - l_old_t) / |y_i|), the geometric mean of the token ratios (Section 3.3.1; Algorithm 1, line 11).

    Gradient: that of the formula. Unclipped and with a constant A it is dJ/dl_t = w_i A / D for every token t of the
    sequence; line 21 of Algorithm 1 prints it without the sum over the tokens whose loss w_i enters, and so with a
    spurious 1/|y_i|.

    Collectives (context parallel): forward one all-reduce of G sums. Backward none if `constant_factors`: the |y_i| equal
    terms of that sum cancel 1/|y_i|, so each token may carry its own share, exp(sg[s_i] + l_t - sg[l_t]), without
    hearing of the others. Otherwise one all-reduce of G gradients.
    """
    if constant_factors:
        log_w_R = segments.spread(segments.mean_detached(log_ratio_R))
        return exp_clamped(log_w_R + (log_ratio_R - log_ratio_R.detach()))
    return exp_clamped(segments.spread(segments.mean(log_ratio_R)))


def prefix_ratio(log_ratio_R: Tensor, segments: Segments, constant_factors: bool) -> Tensor:
    """r_t = exp(sum_{j <= t} (l_j - l_old_j) / t), the geometric mean of the token ratios up to t (Table 5, Prefix Importance
    Sampling).

    Gradient: that of the formula; token j enters the ratios of all t >= j, with 1/t. Collectives (context parallel): one
    all-reduce of G x 2 cp sums in forward, one in backward.
    """
    return exp_clamped(segments.running_mean(log_ratio_R))


def no_ratio(log_ratio_R: Tensor, segments: Segments, constant_factors: bool) -> Tensor:
    """1: no importance sampling (GPG, arXiv 2504.02546). No collective, no gradient."""
    return torch.ones_like(log_ratio_R)


RATIOS: dict[str, RatioFunction] = {"token": token_ratio, "sequence": sequence_ratio, "prefix": prefix_ratio, "none": no_ratio}
