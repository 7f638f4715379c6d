"""The advantages of groups in fp64, in plain Python, from the papers' formulas; the part of `reference.py` before the loss."""

import math
from collections.abc import Sequence
from typing import Any

Groups = Sequence[Sequence[float]]  # rewards


def group_advantages(kind: str, groups: Groups, terms: Sequence[Sequence[Sequence[Any]]] = ()) -> list[float]:
    """Return the advantage of each sample from the rewards of its group, group after group.

    Args:
        terms: (weight, value) of each term of the reward of each sample, which `gdpo` reads. What a reward has beyond them is a
            term of weight 1.
    Raises:
        KeyError: The kind is unknown.
    """
    if kind == "gdpo":
        return _gdpo(groups, terms or [[[] for _ in rewards] for rewards in groups])
    samples, silent = sum(map(len, groups)), sum(len(rewards) for rewards in groups if max(rewards) == min(rewards))
    advantages: list[float] = []
    for rewards in groups:
        n, mean = len(rewards), math.fsum(rewards) / len(rewards)
        of_std, of_others, of_groups = 1 / (_deviation(rewards) + 1e-6), n / max(1, n - 1), samples / max(1, samples - silent)
        factor = {"none": 0.0, "mean": 1.0, "std": of_std, "leave_one_out": of_others, "gpg": of_groups}[kind]
        advantages += [factor * (r - mean) if max(rewards) > min(rewards) else 0.0 for r in rewards]
    return advantages


def _gdpo(groups: Groups, terms: Sequence[Sequence[Sequence[Any]]]) -> list[float]:
    """Normalize each term in its group, add them up by weight, and normalize the sums (arXiv 2601.05242)."""
    sums: list[float] = []
    for rewards, of_group in zip(groups, terms, strict=True):
        rest = [(1.0, r - math.fsum(w * v for w, v in own)) for r, own in zip(rewards, of_group, strict=True)]
        totals = [0.0] * len(rewards)
        for column in zip(*([*own, last] for own, last in zip(of_group, rest, strict=True)), strict=True):
            values = [value for _, value in column]
            mean, spread = math.fsum(values) / len(values), _deviation(values)
            totals = [total + w * (v - mean) / (spread + 1e-6) for total, (w, v) in zip(totals, column, strict=True)]
        sums += totals
    mean, spread = math.fsum(sums) / len(sums), _deviation(sums)
    return [(x - mean) / (spread + 1e-6) for x in sums]


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation (ddof 1); 0 of one value."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / max(1, len(values) - 1))
