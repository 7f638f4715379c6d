"""Rollouts whose tokens are code points, and a math reward to grade them with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tepo_megatron.rewards.boxed import last_boxed
from tepo_megatron.rewards.math import MathTerm
from tepo_megatron.rewards.pool import GradingPool, PoolLimits
from tepo_megatron.rewards.terms import Term, WeightedReward
from tepo_megatron.types import Rollout


def decode(ids: Sequence[int]) -> str:
    """Token ids are code points here."""
    return "".join(map(chr, ids))


def rollout(response: str, answer: str = "7", prompt_id: int = 0, prompt: str = "?") -> Rollout:
    """A prompt and `response`, ungraded."""
    token_ids_L = torch.tensor([*map(ord, prompt + response)])
    response_mask_L = torch.arange(token_ids_L.numel()) >= len(prompt)
    logprobs_L = torch.zeros(token_ids_L.numel())
    return Rollout(prompt_id, token_ids_L, response_mask_L, logprobs_L, 0, "stop", answer)


def math_reward(workers: int = 1, soft_seconds: float = 1, hard_seconds: float = 2) -> WeightedReward:
    """Of boxes alone."""
    limits = PoolLimits(workers, soft_seconds, hard_seconds, memory_mib=1024)
    return WeightedReward([(1.0, MathTerm(last_boxed, limits))], decode)


def pool_of(term: Term) -> GradingPool:
    """The pool that a term has."""
    pool = getattr(term, "pool", None)
    assert isinstance(pool, GradingPool)
    return pool


def worker_pids(reward: WeightedReward) -> list[int]:
    """Of its first term."""
    return pool_of(reward.terms[0][1]).pids


def statuses(reward: WeightedReward, responses: Sequence[str], answer: str = "7") -> list[str]:
    """What each response is graded."""
    return [graded.status for graded in reward.score([rollout(text, answer) for text in responses])]
