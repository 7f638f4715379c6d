"""Overlong shaping: what DAPO's formula gives, and what it leaves alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tepo_megatron.errors import ConfigError
from tepo_megatron.rewards.overlong import OverlongShaping
from tepo_megatron.types import Rollout


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


@pytest.mark.parametrize(
    ("response_tokens", "term"),
    [(1, 0.0), (16383, 0.0), (16384, 0.0), (16385, -1 / 4096), (17408, -0.25), (18432, -0.5), (20480, -1.0)],
)
def test_the_penalty_of_dapo(response_tokens: int, term: float) -> None:
    # three pieces of arXiv 2503.14476: 0 up to 16384, then down to -1 at 20480
    assert OverlongShaping(max_tokens=20480, buffer_tokens=4096, penalty=1.0).term(response_tokens) == pytest.approx(term)


def test_the_penalty_is_scaled_by_its_maximum() -> None:
    assert OverlongShaping(max_tokens=100, buffer_tokens=20, penalty=0.5).term(90) == pytest.approx(-0.25)


def test_only_the_reward_changes() -> None:
    shaping = OverlongShaping(max_tokens=10, buffer_tokens=4, penalty=1.0)
    rollouts = [graded(5, 1.0), graded(7, 1.0), graded(8, 0.0), graded(10, 1.0)]
    shaped = shaping.shape(rollouts)
    assert [r.reward for r in shaped] == pytest.approx([1.0, 0.75, -0.5, 0.0])
    for before, after in zip(rollouts, shaped, strict=True):
        fields = [f.name for f in dataclasses.fields(Rollout) if f.name != "reward"]
        assert all(getattr(before, name) is getattr(after, name) for name in fields)


@pytest.mark.parametrize("buffer", [8, 9])
def test_a_buffer_as_long_as_the_response_is_refused(buffer: int) -> None:
    with pytest.raises(ConfigError, match=rf"overlong_buffer_tokens={buffer} must be below rollout\.max_response_tokens=8"):
        OverlongShaping(max_tokens=8, buffer_tokens=buffer, penalty=1.0)
