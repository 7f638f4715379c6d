"""Surrogates of the policy objective, to be maximised, per response row (_R).

A surrogate is a function (ratio_R, logprob_R, advantage_R, bounds) -> (value_R, clipped_R); clipped_R (bool) marks the rows on
which the bounds act: whose gradient they remove or, for `stop_gradient`, whose weight they limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    """The ratio is clipped to [1 - low, 1 + high]; dual: where A < 0, the value never falls below dual * A (None: it may)."""

    low: float
    high: float
    dual: float | None = None

    def clip(self, ratio_R: Tensor) -> Tensor:
        """The ratio within the bounds."""
        return ratio_R.clamp(1 - self.low, 1 + self.high)


SurrogateFunction = Callable[[Tensor, Tensor, Tensor, Bounds], tuple[Tensor, Tensor]]


def clip(ratio_R: Tensor, logprob_R: Tensor, advantage_R: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r) A): PPO's pessimistic bound (arXiv 1707.06347, Eq. 7); for A < 0 and with `dual`, max(that, dual A)
    (arXiv 1912.09729).
    """
    value_R = torch.minimum(ratio_R * advantage_R, bounds.clip(ratio_R) * advantage_R)
    positive, negative = advantage_R > 0, advantage_R < 0
    clipped_R = (positive & (ratio_R > 1 + bounds.high)) | (negative & (ratio_R < 1 - bounds.low))
    if bounds.dual is not None:
        clipped_R = clipped_R | (negative & (ratio_R > bounds.dual))
        value_R = torch.where(negative, torch.maximum(value_R, bounds.dual * advantage_R), value_R)
    return value_R, clipped_R


def clip_eq4(ratio_R: Tensor, logprob_R: Tensor, advantage_R: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """min(r, clip(r)) A, Eq. 4 of the TEPO paper to the letter.

    The minimum is taken before A is multiplied, so it is min(r, 1 + high) A: never clipped below, and without gradient above
    1 + high whatever the sign of A (a wrong answer that became likelier is no longer pushed down).
    """
    return torch.minimum(ratio_R, bounds.clip(ratio_R)) * advantage_R, ratio_R > 1 + bounds.high


def unclipped(ratio_R: Tensor, logprob_R: Tensor, advantage_R: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """r A (Algorithm 1, line 15)."""
    return ratio_R * advantage_R, torch.zeros_like(ratio_R, dtype=torch.bool)


def stop_gradient(ratio_R: Tensor, logprob_R: Tensor, advantage_R: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """sg[clip(r)] A l: the clipped ratio weighs a token and never silences it (CISPO, arXiv 2506.13585)."""
    weight_R = bounds.clip(ratio_R).detach()
    return weight_R * advantage_R * logprob_R, weight_R != ratio_R


def reinforce(ratio_R: Tensor, logprob_R: Tensor, advantage_R: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """A l (Williams, 1992), whatever the ratio."""
    return advantage_R * logprob_R, torch.zeros_like(ratio_R, dtype=torch.bool)


SURROGATES: dict[str, SurrogateFunction] = {
    "clip": clip,
    "clip_eq4": clip_eq4,
    "unclipped": unclipped,
    "stop_gradient": stop_gradient,
    "reinforce": reinforce,
}
