"""Surrogates of the policy objective, to be maximised, per response row (_R).

A surrogate is a function (ratio_R, advantage_R, clip_low, clip_high) -> (value_R, clipped_R); clipped_R (bool) marks rows whose
gradient the clipping removes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SurrogateFunction = Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def clip(ratio_R: Tensor, advantage_R: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO's pessimistic bound (arXiv 1707.06347, Eq. 7)."""
    clipped = ratio_R.clamp(1 - clip_low, 1 + clip_high)
    value_R = torch.minimum(ratio_R * advantage_R, clipped * advantage_R)
    too_high = (advantage_R > 0) & (ratio_R > 1 + clip_high)
    too_low = (advantage_R < 0) & (ratio_R < 1 - clip_low)
    return value_R, too_high | too_low


def clip_eq4(ratio_R: Tensor, advantage_R: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """min(r, clip(r)) A, Eq. 4 of the TEPO paper to the letter.

    The minimum is taken before A is multiplied, so it is min(r, 1 + clip_high) A: never clipped below, and without gradient
    above 1 + clip_high whatever the sign of A (a wrong answer that became likelier is no longer pushed down).
    """
    return torch.minimum(ratio_R, ratio_R.clamp(1 - clip_low, 1 + clip_high)) * advantage_R, ratio_R > 1 + clip_high


def unclipped(ratio_R: Tensor, advantage_R: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """r A (Algorithm 1, line 15)."""
    return ratio_R * advantage_R, torch.zeros_like(ratio_R, dtype=torch.bool)


SURROGATES: dict[str, SurrogateFunction] = {"clip": clip, "clip_eq4": clip_eq4, "unclipped": unclipped}
