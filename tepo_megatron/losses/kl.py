"""KL penalties towards another policy: estimators per token, and masks that select the tokens to penalise.

An estimator is a function (x_R, log_ratio_R) -> value_R, an `Estimator`:
    x_R: l - l_other in nats, the current minus the other policy's log-prob of each token
    log_ratio_R: l - l_old in nats. The tokens are samples of the old policy. Where that is the other policy, it equals x_R.
    value_R: estimated KL(pi_theta || pi_other) in nats
"In the mean" below is over tokens from the named policy, in a given state. docs/paper.md compares the estimators.

A mask is a function (advantage_R, entropy_change_R, tolerance) -> bool_R, a `Mask`:
    advantage_R: advantage A
    entropy_change_R: dH = H - H_old in nats
    tolerance: nats; |dH| up to it counts as no change
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tepo_megatron.losses.ratio import MAX_LOG_RATIO, exp_clamped

Estimator = Callable[[Tensor, Tensor], Tensor]
Mask = Callable[[Tensor, Tensor, float], Tensor]


def k1(x_R: Tensor, log_ratio_R: Tensor) -> Tensor:
    """Return x, of either sign. Samples of pi_theta give KL(pi_theta || pi_other) in the mean, and a gradient of 0: in a
    loss it then only adds noise.

    Samples of pi_other give -KL(pi_other || pi_theta). As a penalty it then pushes pi_theta away from pi_other.
    """
    return x_R


def k2(x_R: Tensor, log_ratio_R: Tensor) -> Tensor:
    """Return x^2 / 2, which is never negative."""
    return x_R.square() / 2


def k3(x_R: Tensor, log_ratio_R: Tensor) -> Tensor:
    """Return exp(-x) + x - 1, which is never negative (Schulman, "Approximating KL divergence"; GRPO, Eq. 4).

    The value is KL(pi_theta || pi_other) in the mean over samples of pi_theta. Over samples of the old policy both value and
    gradient are biased; those of `k3_importance_weighted` are not.
    """
    return torch.expm1(-x_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + x_R


def k3_importance_weighted(x_R: Tensor, log_ratio_R: Tensor) -> Tensor:
    """Return k3 times the ratio r = pi_theta / pi_old (DeepSeek-V3.2, arXiv 2512.02556). It is never negative.

    Value and gradient are those of KL(pi_theta || pi_other) in the mean over samples of the old policy. Towards the old policy
    itself it is r ln r - r + 1. Outside of +-20 nats it is a constant there.
    Gradient: also through the weight r, without which it would be biased.
    """
    x_R = x_R.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return exp_clamped(log_ratio_R) * (torch.expm1(-x_R) + x_R)


def absolute(x_R: Tensor, log_ratio_R: Tensor) -> Tensor:
    """Return |x|."""
    return x_R.abs()


def mask_none(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Select no token."""
    return torch.zeros_like(advantage_R, dtype=torch.bool)


def mask_all(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Select every token: the undifferentiated KL of Table 3, Panel A."""
    return torch.ones_like(advantage_R, dtype=torch.bool)


def mask_falling_entropy(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Select the tokens with A > 0 and dH < -tolerance: TEPO's mask M (Eq. 4)."""
    return (advantage_R > 0) & (entropy_change_R < -tolerance)


def mask_rising_entropy(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Select the tokens with A < 0 and dH > tolerance (Section 3.3.2, Panel E)."""
    return (advantage_R < 0) & (entropy_change_R > tolerance)


def mask_both(advantage_R: Tensor, entropy_change_R: Tensor, tolerance: float) -> Tensor:
    """Select the tokens of either mask, falling or rising entropy (Panel E)."""
    falling = mask_falling_entropy(advantage_R, entropy_change_R, tolerance)
    return falling | mask_rising_entropy(advantage_R, entropy_change_R, tolerance)


# The exact KL of each token over the whole vocabulary: no estimator, it comes from `ops/token_statistics/teacher.py`.
FULL_VOCABULARY = "full"

ESTIMATORS: dict[str, Estimator] = {
    "k1": k1, "k2": k2, "k3": k3, "k3_importance_weighted": k3_importance_weighted, "abs": absolute,
}  # fmt: skip
MASKS: dict[str, Mask] = {
    "none": mask_none, "all": mask_all, "falling_entropy": mask_falling_entropy, "rising_entropy": mask_rising_entropy,
    "both": mask_both,
}  # fmt: skip
