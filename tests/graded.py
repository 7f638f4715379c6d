"""Rollouts whose tokens are code points, and a math reward to grade them with."""

from collections.abc import Sequence

import torch

from tepo_megatron.base.types import Rollout
from tepo_megatron.rewards.local import MathTerm
from tepo_megatron.rewards.pool import GradingPool, PoolLimits
from tepo_megatron.rewards.terms import RewardTerm, WeightedReward


def decode(ids: Sequence[int]) -> str:
    """Decode token ids, which are code points here."""
    return "".join(map(chr, ids))


def rollout(response: str, answer: str = "7", prompt_id: int = 0, prompt: str = "?") -> Rollout:
    token_ids_L = torch.tensor([*map(ord, prompt + response)])
    response_mask_L = torch.arange(token_ids_L.numel()) >= len(prompt)
    logprobs_L = torch.zeros(token_ids_L.numel())
    return Rollout(prompt_id, token_ids_L, response_mask_L, logprobs_L, 0, "stop", answer)


def math_reward(workers: int = 1, soft_seconds: float = 1, hard_seconds: float = 2) -> WeightedReward:
    """Return a math reward that grades boxed answers only."""
    limits = PoolLimits(workers, soft_seconds, hard_seconds, memory_mib=1024)
    return WeightedReward([(1.0, MathTerm("boxed", limits))], decode)


def pool_of(term: RewardTerm) -> GradingPool:
    assert term.pool is not None
    return term.pool


def worker_pids(reward: WeightedReward) -> list[int]:
    """Return the process ids of the workers of the first term."""
    return pool_of(reward.terms[0][1]).pids


def statuses(reward: WeightedReward, responses: Sequence[str], answer: str = "7") -> list[str]:
    """Return the grading status of each response."""
    return [graded.status for graded in reward.score([rollout(text, answer) for text in responses])]
