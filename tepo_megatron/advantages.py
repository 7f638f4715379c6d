"""Advantages from groups of responses to one prompt, and which groups teach anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

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


def group_advantages(rollouts: Sequence[Rollout], scale: Literal["std", "none"]) -> Tensor:
    """[B] fp32, one advantage for each rollout, from the shaped rewards of its group; computed in fp64.

    "std": (r - mean) / (std + 1e-6), std with ddof 1 (GRPO as the paper has it); "none": r - mean (Dr. GRPO,
    arXiv 2503.20783). A group of one gets 0. Raises ValueError on a reward that is not finite (an ungraded rollout),
    and as `split_groups` does.
    """
    advantages = [torch.empty(0, dtype=torch.float64)]
    for group in split_groups(rollouts):
        for rollout in group:
            if not math.isfinite(rollout.reward):
                raise ValueError(
                    f"a rollout of prompt {rollout.prompt_id} has reward {rollout.reward} "
                    f"(status {rollout.status!r}); grade the rollouts first"
                )
        rewards_G = torch.tensor([rollout.reward for rollout in group], dtype=torch.float64)
        centered_G = rewards_G - rewards_G.mean()
        if scale == "std" and len(group) > 1:
            centered_G = centered_G / (rewards_G.std(correction=1) + _STD_EPS)
        advantages.append(centered_G)
    return torch.cat(advantages).float()
