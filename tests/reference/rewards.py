"""Transformations of rewards before the group advantages: DAPO's overlong penalty, a reference KL in the reward."""

import torch

from tepo_megatron.report.audit.reference import Comparisons, Formula, divergence
from tests.reference.minibatches import Response


def overlong_penalty(tokens: int, max_tokens: int, buffer: int, penalty: float = 1.0) -> float:
    """Return the term that DAPO (Eq. 13, arXiv 2503.14476) adds to the reward.

    It is 0 up to max_tokens - buffer, then falls linearly to -penalty at max_tokens.
    """
    if tokens <= max_tokens - buffer:
        return 0.0
    if tokens <= max_tokens:
        return penalty * (max_tokens - buffer - tokens) / buffer
    return -penalty


def reward_towards_reference(method: Formula, reward: float, response: Response) -> float:
    """Return the reward minus ref_beta times the response's summed KL(l_old - l_ref)."""
    old, ref = (torch.tensor(x, dtype=torch.float64) for x in (response.old, response.ref))
    kl = divergence(method.ref_kl, Comparisons(old.numel(), method.log_ratio_limit), old - ref, torch.zeros_like(old))
    return reward - method.ref_beta * float(kl.sum())
