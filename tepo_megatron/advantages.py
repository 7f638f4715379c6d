"""Advantages from groups of responses to one prompt, and which groups teach anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from tepo_megatron.types import Rollout

_STD_EPS = 1e-6


def split_groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The runs of rollouts that share a prompt_id, in order.

    Raises ValueError if a prompt_id comes in two runs: its mean would be taken over a part of its group.
    """
    groups = [list(run) for _, run in groupby(rollouts, key=lambda rollout: rollout.prompt_id)]
    seen: set[int] = set()
    for group in groups:
        prompt_id = group[0].prompt_id
        if prompt_id in seen:
            raise ValueError(f"the rollouts of prompt {prompt_id} are not next to each other; order them by prompt")
        seen.add(prompt_id)
    return groups


def informative(groups: Sequence[list[Rollout]]) -> list[list[Rollout]]:
    """The groups whose unshaped scores differ: all right or all wrong says nothing about which response was better.

    (The paper's Section 4.1; the filter of DAPO's dynamic sampling, arXiv 2503.14476.)
    """
    return [group for group in groups if len({rollout.score for rollout in group}) > 1]


def group_advantages(rollouts: Sequence[Rollout], kind: str) -> Tensor:
    """[B] fp32, one advantage for each rollout, from the shaped rewards of its group; computed in fp64.

    kind: a name in ADVANTAGES. A group of one gets 0. Raises ValueError on a reward that is not finite (an ungraded rollout),
    and as `split_groups` does.
    """
    for rollout in rollouts:
        if not math.isfinite(rollout.reward):
            raise ValueError(
                f"a rollout of prompt {rollout.prompt_id} has reward {rollout.reward} (status {rollout.status!r}); "
                f"grade the rollouts first"
            )
    groups = [torch.tensor([r.reward for r in group], dtype=torch.float64) for group in split_groups(rollouts)]
    return torch.cat([torch.empty(0, dtype=torch.float64), *ADVANTAGES[kind](groups)]).float()


def penalized(rollouts: Sequence[Rollout], penalty_B: Tensor) -> tuple[Rollout, ...]:
    """The rollouts with penalty_B [B] taken from their (shaped) rewards."""
    return tuple(replace(r, reward=r.reward - float(p)) for r, p in zip(rollouts, penalty_B, strict=True))


def _std(groups: list[Tensor]) -> list[Tensor]:
    """(r - mean) / (std + 1e-6), std with ddof 1: GRPO as the paper has it."""
    return [(r - r.mean()) / (r.std(correction=1) + _STD_EPS) if r.numel() > 1 else r - r for r in groups]


def _mean(groups: list[Tensor]) -> list[Tensor]:
    """r - mean (Dr. GRPO, arXiv 2503.20783)."""
    return [r - r.mean() for r in groups]


def _leave_one_out(groups: list[Tensor]) -> list[Tensor]:
    """r - mean of the others (RLOO, arXiv 2402.14740): (r - mean) n / (n - 1)."""
    return [(r - r.mean()) * r.numel() / max(1, r.numel() - 1) for r in groups]


def _gpg(groups: list[Tensor]) -> list[Tensor]:
    """alpha (r - mean), alpha = B / (B - M), M the samples in groups of equal rewards, which contribute nothing.

    (GPG, arXiv 2504.02546. Its public code counts rewards that are not zero instead of M.)
    """
    samples = sum(r.numel() for r in groups)
    silent = sum(r.numel() for r in groups if bool((r == r[0]).all()))
    alpha = samples / max(1, samples - silent)
    return [alpha * (r - r.mean()) for r in groups]


ADVANTAGES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "std": _std,
    "mean": _mean,
    "leave_one_out": _leave_one_out,
    "gpg": _gpg,
}
