"""KL penalties towards another policy: estimators per token, and masks that say which tokens bear them.

An estimator is a function of x_R = l - l_other (nats), a mask one of (advantage_R, entropy_change_R, tolerance) -> bool_R.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tepo_megatron.losses.ratio import MAX_LOG_RATIO

Estimator = Callable[[Tensor], Tensor]
Mask = Callable[[Tensor, Tensor, float], Tensor]


def k1(x_R: Tensor) -> Tensor:
    """x: unbiased under pi_theta, of either sign."""
    return x_R


def k2(x_R: Tensor) -> Tensor:
    """x^2 / 2."""
    return x_R.square() / 2


def k3(x_R: Tensor) -> Tensor:
    """exp(-x) + x - 1: never negative; unbiased under pi_theta only (Schulman, "Approximating KL divergence"; GRPO, Eq. 4)."""
    return torch.expm1(-x_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + x_R


def k3_reverse(x_R: Tensor) -> Tensor:
    """r ln r - r + 1 with r = exp(x): k3 with the policies exchanged, weighted by r."""
    x_R = x_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return x_R.exp() * x_R - torch.expm1(x_R)


def absolute(x_R: Tensor) -> Tensor:
    """|x|."""
    return x_R.abs()


def mask_none(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """No token."""
    return torch.zeros_like(advantage_R, dtype=torch.bool)


def mask_all(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Every token (the undifferentiated KL of Table 3, Panel A)."""
    return torch.ones_like(advantage_R, dtype=torch.bool)


def mask_falling_entropy(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """M of Eq. 4: A > 0 and dH < 0, dH = H - H_old, with |dH| <= tolerance counted as no change."""
    return (advantage_R > 0) & (entropy_change_R < -tolerance)


def mask_rising_entropy(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """A < 0 and dH > 0 (Section 3.3.2, Panel E)."""
    return (advantage_R < 0) & (entropy_change_R > tolerance)


def mask_both(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Either of the two (Panel E)."""
    return mask_falling_entropy(advantage_R, entropy_change_R, tolerance) | mask_rising_entropy(
        advantage_R, entropy_change_R, tolerance
    )


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "k3_reverse": k3_reverse, "abs": absolute}
MASKS: dict[str, Mask] = {
    "none": mask_none,
    "all": mask_all,
    "falling_entropy": mask_falling_entropy,
    "rising_entropy": mask_rising_entropy,
    "both": mask_both,
}
