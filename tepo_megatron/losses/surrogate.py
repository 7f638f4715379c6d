"""Surrogates of the policy objective, to be maximised, per response row (_R).

A surrogate is a function (ratio_R, logprob_R, advantage_R, bounds) -> (value_R, clipped_R), a `SurrogateFunction`:
    ratio_R: importance ratio r (ratio.py)
    logprob_R: current log-prob l of the response token, in nats
    advantage_R: advantage A
    bounds: the clip range and the dual clip
    value_R: the surrogate
    clipped_R: bool, the rows on which the bounds act: they remove the gradient or, for `stop_gradient`, limit the weight
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClipBounds:
    """The clip range of the ratio and the dual clip.

    Attributes:
        low: The ratio is clipped from below at 1 - low.
        high: The ratio is clipped from above at 1 + high.
        dual: Dual-clip constant above 1: where A < 0, the value does not fall below dual * A. None: no such floor.
    """

    low: float
    high: float
    dual: float | None = None

    def clip(self, ratio_R: Tensor) -> Tensor:
        """Return the ratio clamped to [1 - low, 1 + high]."""
        return ratio_R.clamp(1 - self.low, 1 + self.high)


SurrogateFunction = Callable[[Tensor, Tensor, Tensor, ClipBounds], tuple[Tensor, Tensor]]


def clip(ratio_R: Tensor, logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r) A), PPO's pessimistic bound (arXiv 1707.06347, Eq. 7).

    With `bounds.dual` and A < 0 it is max(min(r A, clip(r) A), dual A), dual-clip PPO (arXiv 1912.09729).

    Args: see `SurrogateFunction` at the top of this file.
    """
    value_R = torch.minimum(ratio_R * advantage_R, bounds.clip(ratio_R) * advantage_R)
    positive, negative = advantage_R > 0, advantage_R < 0
    clipped_R = (positive & (ratio_R > 1 + bounds.high)) | (negative & (ratio_R < 1 - bounds.low))
    if bounds.dual is not None:
        clipped_R = clipped_R | (negative & (ratio_R > bounds.dual))
        value_R = torch.where(negative, torch.maximum(value_R, bounds.dual * advantage_R), value_R)
    return value_R, clipped_R


def clip_eq4(ratio_R: Tensor, logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor]:
    """Return min(r, clip(r)) A, the surrogate of TEPO's Eq. 4 as printed.

    Eq. 4 takes the minimum before it multiplies by A, which makes it min(r, 1 + high) A. The ratio is never clipped from below,
    and above 1 + high there is no gradient whatever the sign of A: a wrong answer that became likelier is not pushed down.

    Args: see `SurrogateFunction` at the top of this file.
    """
    return torch.minimum(ratio_R, bounds.clip(ratio_R)) * advantage_R, ratio_R > 1 + bounds.high


def unclipped(ratio_R: Tensor, logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor]:
    """Return r A, without clipping (Algorithm 1, line 15).

    Args: see `SurrogateFunction` at the top of this file.
    """
    return ratio_R * advantage_R, torch.zeros_like(ratio_R, dtype=torch.bool)


def stop_gradient(ratio_R: Tensor, logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor]:
    """Return sg[clip(r)] A l (CISPO, arXiv 2506.13585).

    The clipped ratio is a detached weight: a clipped token still has a gradient.

    Args: see `SurrogateFunction` at the top of this file.
    """
    weight_R = bounds.clip(ratio_R).detach()
    return weight_R * advantage_R * logprob_R, weight_R != ratio_R


def reinforce(ratio_R: Tensor, logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor]:
    """Return A l, REINFORCE (Williams, 1992). The ratio has no effect.

    Args: see `SurrogateFunction` at the top of this file.
    """
    return advantage_R * logprob_R, torch.zeros_like(ratio_R, dtype=torch.bool)


_SURROGATES = (clip, clip_eq4, unclipped, stop_gradient, reinforce)
SURROGATES: dict[str, SurrogateFunction] = {surrogate.__name__: surrogate for surrogate in _SURROGATES}
