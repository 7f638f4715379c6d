"""Transformations of rewards before the loss: group advantages, DAPO's overlong penalty, a reference KL in the reward."""

from __future__ import annotations

import math

from tests.reference.objectives import divergence
from tests.reference.parts import Conditions, Method, Response, number


def group_advantages(kind: str, groups: list[list[float]]) -> list[float]:
    """Return one advantage for each reward, group after group. A group of one, or of equal rewards, gets zeros."""
    if kind == "gdpo":
        return gdpo_advantages([[[r] for r in g] for g in groups], [1.0])
    samples = sum(len(g) for g in groups)
    silent = sum(len(g) for g in groups if max(g) == min(g))
    out = []
    for g in groups:
        for i, r in enumerate(g):
            if max(g) == min(g):
                out.append(0.0)
                continue
            others = [s for j, s in enumerate(g) if j != i]
            mean = sum(g) / len(g)
            std = math.sqrt(sum((s - mean) ** 2 for s in g) / (len(g) - 1))
            out.append({
                "std": (r - mean) / (std + 1e-6),
                "mean": r - mean,
                "none": 0.0,
                "leave_one_out": r - sum(others) / len(others),
                "gpg": samples / (samples - silent) * (r - mean),
            }[kind])  # fmt: skip
    return out


def gdpo_advantages(groups: list[list[list[float]]], weights: list[float]) -> list[float]:
    """Return GDPO's advantages (arXiv 2601.05242), group after group."""
    sums = []
    for g in groups:
        for sample in g:
            total = 0.0
            for k, weight in enumerate(weights):
                column = [other[k] for other in g]
                mean = sum(column) / len(g)
                std = math.sqrt(sum((r - mean) ** 2 for r in column) / (len(g) - 1)) if len(g) > 1 else 0.0
                total += weight * (sample[k] - mean) / (std + 1e-6)
            sums.append(total)
    mean = sum(sums) / len(sums)
    std = math.sqrt(sum((x - mean) ** 2 for x in sums) / (len(sums) - 1))
    return [(x - mean) / (std + 1e-6) for x in sums]


def overlong_penalty(tokens: int, max_tokens: int, buffer: int, penalty: float = 1.0) -> float:
    """Return the term that DAPO (Eq. 13, arXiv 2503.14476) adds to the reward.

    It is 0 up to max_tokens - buffer, then falls linearly to -penalty at max_tokens.
    """
    if tokens <= max_tokens - buffer:
        return 0.0
    if tokens <= max_tokens:
        return penalty * (max_tokens - buffer - tokens) / buffer
    return -penalty


def reward_towards_reference(method: Method, reward: float, response: Response) -> float:
    """Return the reward minus ref_beta times the response's summed KL(l_old - l_ref)."""
    pairs = zip(response.old, response.ref, strict=True)
    kl = (divergence(method.ref_kl, number(o - r), number(0.0), Conditions()) for o, r in pairs)
    return reward - method.ref_beta * sum(k.item() for k in kl)
