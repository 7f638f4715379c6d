"""Group advantages against the formula, and the groups that are left out."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from tepo_megatron.losses.advantages import ADVANTAGES, group_advantages, split_groups
from tepo_megatron.rollout.collector import informative
from tepo_megatron.types import Rollout


def rollouts(*groups: tuple[int, list[float]]) -> list[Rollout]:
    """(prompt id, rewards) -> graded rollouts; the score is 1 where the reward is positive."""
    ids_L = torch.tensor([1, 2])
    mask_L = torch.tensor([False, True])
    return [
        Rollout(
            prompt_id,
            ids_L,
            mask_L,
            torch.zeros(2),
            0,
            "stop",
            reward=reward,
            score=float(reward > 0),
            status="ok",
        )
        for prompt_id, rewards in groups
        for reward in rewards
    ]


def test_std_is_the_papers_formula() -> None:
    groups = [(3, [1.0, 0.0, 0.0, 1.0]), (1, [0.9, -0.1, 0.3]), (2, [0.0, 1.0])]
    expected = [(r - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6) for _, rewards in groups for r in rewards]
    advantages_B = group_advantages(rollouts(*groups), "std")
    assert advantages_B.dtype == torch.float32
    torch.testing.assert_close(advantages_B, torch.tensor(expected), rtol=1e-6, atol=1e-7)
    assert advantages_B[-1].item() == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6), rel=1e-6)  # ddof 1, not 0


def test_mean_only_centers() -> None:
    advantages_B = group_advantages(rollouts((0, [1.0, 0.0, 0.0, 0.0]), (1, [2.0, 4.0])), "mean")
    torch.testing.assert_close(advantages_B, torch.tensor([0.75, -0.25, -0.25, -0.25, -1.0, 1.0]))


@pytest.mark.parametrize("scale", sorted(ADVANTAGES))
def test_uniform_and_single_groups_get_zero(scale: str) -> None:
    advantages_B = group_advantages(rollouts((0, [1.0] * 8), (1, [0.7]), (2, [0.0] * 3)), scale)
    assert advantages_B.tolist() == [0.0] * 12


def test_computed_in_fp64() -> None:
    # in fp32 the mean of these is off by more than their spread
    advantages_B = group_advantages(rollouts((0, [1e8, 1e8 + 1, 1e8 + 2])), "mean")
    assert advantages_B.tolist() == [-1.0, 0.0, 1.0]


def test_no_rollouts() -> None:
    assert group_advantages([], "std").shape == (0,)
    assert split_groups([]) == []
    assert informative([]) == []


def test_ungraded_rollout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt 4 has reward nan"):
        group_advantages(rollouts((4, [1.0, float("nan")])), "std")


def test_groups_are_runs_of_one_prompt() -> None:
    batch = rollouts((5, [1.0, 0.0]), (2, [0.0]), (9, [1.0, 1.0, 0.0]))
    groups = split_groups(batch)
    assert [[r.prompt_id for r in group] for group in groups] == [[5, 5], [2], [9, 9, 9]]
    assert [r for group in groups for r in group] == batch


def test_scattered_group_is_refused() -> None:
    batch = rollouts((5, [1.0, 0.0]), (2, [0.0, 1.0]), (5, [1.0]))
    for function in (split_groups, lambda b: group_advantages(b, "std")):
        with pytest.raises(ValueError, match="prompt 5 are not next to each other"):
            function(batch)


def test_informative_looks_at_the_unshaped_score() -> None:
    mixed = rollouts((0, [1.0, 0.0]))
    all_right_shaped = rollouts((1, [1.0, 0.4]))  # rewards differ, scores do not
    all_wrong_shaped = rollouts((2, [-0.5, 0.0]))
    single = rollouts((3, [1.0]))
    assert informative([all_right_shaped, mixed, all_wrong_shaped, single]) == [mixed]


def test_leave_one_out_is_the_reward_over_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.0, 0.5, 0.25]
    expected = [r - statistics.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    torch.testing.assert_close(group_advantages(rollouts((0, rewards)), "leave_one_out"), torch.tensor(expected))


def test_gpg_makes_up_for_groups_of_equal_rewards() -> None:
    """Eight samples, four of them in silent groups: alpha = 8 / (8 - 4)."""
    advantages_B = group_advantages(rollouts((0, [1.0, 1.0]), (1, [1.0, 0.0, 0.0, 0.0]), (2, [0.0, 0.0])), "gpg")
    torch.testing.assert_close(advantages_B, torch.tensor([0, 0, 1.5, -0.5, -0.5, -0.5, 0, 0]))
