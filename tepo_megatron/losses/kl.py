"""KL penalties towards another policy: estimators per token, and masks that select the tokens to penalise.

An estimator is a function x_R -> value_R of x = l - l_other, the current minus the other policy's log-prob of a token, in nats.
A mask is a function (advantage_R, entropy_change_R, tolerance) -> bool_R, a `Mask`:
    advantage_R: advantage A
    entropy_change_R: dH = H - H_old in nats
    tolerance: nats; |dH| up to it counts as no change
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tepo_megatron.losses.ratio import MAX_LOG_RATIO

Estimator = Callable[[Tensor], Tensor]
Mask = Callable[[Tensor, Tensor, float], Tensor]


def k1(x_R: Tensor) -> Tensor:
    """Return x, of either sign. Under samples of pi_theta its mean is KL(pi_theta || pi_other)."""
    return x_R


def k2(x_R: Tensor) -> Tensor:
    """Return x^2 / 2. It is never negative."""
    return x_R.square() / 2


def k3(x_R: Tensor) -> Tensor:
    """Return exp(-x) + x - 1, which is never negative (Schulman, "Approximating KL divergence"; GRPO, Eq. 4).

    Its mean is KL(pi_theta || pi_other) under samples of pi_theta only. The responses are samples of the old policy, so that
    `k3_reverse`, not k3, is unbiased for the KL to the old policy (Eq. 4 of the TEPO paper).
    """
    return torch.expm1(-x_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + x_R


def k3_reverse(x_R: Tensor) -> Tensor:
    """Return r ln r - r + 1 with r = exp(x), which is k3 weighted by r. It is never negative.

    Under samples of pi_other its mean is KL(pi_theta || pi_other).
    """
    x_R = x_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return x_R.exp() * x_R - torch.expm1(x_R)


def absolute(x_R: Tensor) -> Tensor:
    """Return |x|."""
    return x_R.abs()


def mask_none(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Select no token. Args: see `Mask` at the top of this file."""
    return torch.zeros_like(advantage_R, dtype=torch.bool)


def mask_all(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Select every token: the undifferentiated KL of Table 3, Panel A. Args: see `Mask` at the top of this file."""
    return torch.ones_like(advantage_R, dtype=torch.bool)


def mask_falling_entropy(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Select the tokens with A > 0 and dH < -tolerance: TEPO's mask M (Eq. 4).

    Args: see `Mask` at the top of this file.
    """
    return (advantage_R > 0) & (entropy_change_R < -tolerance)


def mask_rising_entropy(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Select the tokens with A < 0 and dH > tolerance (Section 3.3.2, Panel E). Args: see `Mask` at the top of this file."""
    return (advantage_R < 0) & (entropy_change_R > tolerance)


def mask_both(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Select the tokens of either mask, falling or rising entropy (Panel E). Args: see `Mask` at the top of this file."""
    tokens = advantage_R, entropy_change_R, tolerance
    return mask_falling_entropy(*tokens) | mask_rising_entropy(*tokens)


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "k3_reverse": k3_reverse, "abs": absolute}
MASKS: dict[str, Mask] = {
    "none": mask_none, "all": mask_all, "falling_entropy": mask_falling_entropy, "rising_entropy": mask_rising_entropy,
    "both": mask_both,
}  # fmt: skip
