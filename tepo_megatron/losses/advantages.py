"""Group-relative advantages: each response is compared with the other responses to the same prompt."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from tepo_megatron.types import Rollout

_STD_EPS = 1e-6
AdvantageFunction = Callable[[list[Tensor]], list[Tensor]]  # the rewards of each group -> their advantages


def split_groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts grouped by prompt_id, in order. The rollouts of a prompt must be next to each other.

    Raises:
        ValueError: A prompt_id comes back after another one. Its mean would be taken over a part of its group.
    """
    groups = [list(run) for _, run in groupby(rollouts, key=lambda rollout: rollout.prompt_id)]
    seen: set[int] = set()
    for group in groups:
        prompt_id = group[0].prompt_id
        if prompt_id in seen:
            raise ValueError(f"the rollouts of prompt {prompt_id} are not next to each other; order them by prompt")
        seen.add(prompt_id)
    return groups


def group_advantages(rollouts: Sequence[Rollout], kind: str) -> Tensor:
    """Return one advantage for each rollout: [B] fp32, computed in fp64 from the shaped rewards of its group.

    Args:
        rollouts: Graded rollouts, those of a prompt next to each other. A group of one gets advantage 0.
        kind: A name in ADVANTAGES.

    Raises:
        ValueError: A reward is not finite (the rollout was not graded), or the rollouts of a prompt are not next to each other.
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
    """Return the rollouts with the penalty subtracted from their (shaped) rewards. `score` does not change.

    Args:
        rollouts: B graded rollouts.
        penalty_B: [B] in units of the reward.
    """
    return tuple(replace(r, reward=r.reward - float(p)) for r, p in zip(rollouts, penalty_B, strict=True))


def _std(groups: list[Tensor]) -> list[Tensor]:
    """Return (r - mean) / (std + 1e-6), std with ddof 1: GRPO as in the TEPO paper."""
    return [(r - r.mean()) / (r.std(correction=1) + _STD_EPS) if r.numel() > 1 else r - r for r in groups]


def _mean(groups: list[Tensor]) -> list[Tensor]:
    """Return r - mean (Dr. GRPO, arXiv 2503.20783)."""
    return [r - r.mean() for r in groups]


def _leave_one_out(groups: list[Tensor]) -> list[Tensor]:
    """Return r - mean of the other n - 1 rewards, which is (r - mean) n / (n - 1) (RLOO, arXiv 2402.14740)."""
    return [(r - r.mean()) * r.numel() / max(1, r.numel() - 1) for r in groups]


def _gpg(groups: list[Tensor]) -> list[Tensor]:
    """Return alpha (r - mean) with alpha = B / (B - M) (GPG, arXiv 2504.02546).

    M of the B samples are in groups of equal rewards, which contribute nothing. GPG's public code counts the rewards that are
    not zero instead of M.
    """
    samples = sum(r.numel() for r in groups)
    silent = sum(r.numel() for r in groups if bool((r == r[0]).all()))
    alpha = samples / max(1, samples - silent)
    return [alpha * (r - r.mean()) for r in groups]


ADVANTAGES: dict[str, AdvantageFunction] = {"std": _std, "mean": _mean, "leave_one_out": _leave_one_out, "gpg": _gpg}
