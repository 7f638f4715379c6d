"""Overlong shaping: what DAPO's formula gives, and what it leaves alone."""

import dataclasses

import pytest
import torch

from tepo_megatron.base.types import Rollout, TrainBatch
from tepo_megatron.losses.advantages import group_advantages, without_truncated
from tepo_megatron.rewards.overlong import OverlongShaping


def graded(response_tokens: int, score: float) -> Rollout:
    """A prompt of three tokens and a response of `response_tokens`."""
    mask_L = torch.arange(3 + response_tokens) >= 3
    return Rollout(
        prompt_id=response_tokens,
        token_ids_L=torch.arange(3 + response_tokens),
        response_mask_L=mask_L,
        rollout_logprobs_L=torch.zeros(3 + response_tokens),
        policy_version=4,
        stop_reason="stop",
        reward=score,
        score=score,
        status="exact",
    )


def test_only_the_reward_changes() -> None:
    shaping = OverlongShaping(max_tokens=10, buffer_tokens=4, penalty=1.0)
    rollouts = [graded(5, 1.0), graded(7, 1.0), graded(8, 0.0), graded(10, 1.0)]
    shaped = shaping.shape(rollouts)
    assert [r.reward for r in shaped] == pytest.approx([1.0, 0.75, -0.5, 0.0])
    for before, after in zip(rollouts, shaped, strict=True):
        fields = [f.name for f in dataclasses.fields(Rollout) if f.name != "reward"]
        assert all(getattr(before, name) is getattr(after, name) for name in fields)


def cut_off(rollout: Rollout) -> Rollout:
    return dataclasses.replace(rollout, stop_reason="length")


def test_truncated_responses_are_masked_and_the_others_untouched() -> None:
    ended, truncated = graded(5, 1.0), cut_off(graded(9, 0.0))
    kept, masked = without_truncated([ended, truncated])
    assert kept is ended
    assert (masked.response_length, masked.reward, masked.token_ids_L.numel()) == (0, 0.0, 12)
    assert not masked.rollout_logprobs_L.any()


def test_the_group_keeps_what_a_truncated_response_says() -> None:
    """Its reward is in the mean and the deviation of its group: advantages are made before the mask."""
    group = [dataclasses.replace(graded(5, score), prompt_id=0) for score in (1.0, 1.0, 0.0)]
    batch = [*group[:2], cut_off(group[2])]
    assert group_advantages(batch, "std").tolist() == group_advantages(group, "std").tolist()
    masked = without_truncated(batch)
    assert TrainBatch.build(masked, group_advantages(masked, "std")).response_lengths == [5, 5, 0]
