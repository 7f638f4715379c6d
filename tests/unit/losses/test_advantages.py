"""Group advantages against the formula, and the groups that are left out."""

import pytest
import torch

from tepo_megatron.base.types import Rollout
from tepo_megatron.losses.advantages import group_advantages, split_groups
from tepo_megatron.rollout.collector import informative


def rollouts(*groups: tuple[int, list[float]]) -> list[Rollout]:
    """(prompt id, rewards) -> graded rollouts; the score is 1 where the reward is positive."""
    ids_L = torch.tensor([1, 2])
    mask_L = torch.tensor([False, True])
    return [
        Rollout(prompt_id, ids_L, mask_L, torch.zeros(2), 0, "stop", reward=reward, score=float(reward > 0), status="ok")
        for prompt_id, rewards in groups
        for reward in rewards
    ]


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
