"""The reference as the audit uses it. Its values and gradients next to the product's: `tests/unit/losses`."""

import dataclasses

import numpy as np
import pytest
import torch

from tepo_megatron.base.errors import DataError
from tepo_megatron.losses import OBJECTIVES
from tepo_megatron.losses.advantages import group_advantages
from tepo_megatron.report.audit.comparison import advantages_of, reference_terms
from tepo_megatron.report.audit.reading import AuditBatch
from tepo_megatron.report.audit.reference import Comparisons
from tests.audit_runs import recorded
from tests.objective_cases import draw, replaced
from tests.report_runs import rollout


def test_tokens_at_a_threshold_are_marked() -> None:
    compare = Comparisons(6, 20.0)
    above = compare.above(torch.tensor([1.2, 1.2 + 1e-6, 1.2 - 1e-6, 1.21, 0.5, -1.2], dtype=torch.float64), 1.2)
    assert above.tolist() == [False, True, False, True, False, False]
    assert compare.near_N.tolist() == [False, True, True, False, False, False], "exactly equal is equal in fp32, too"


@pytest.mark.parametrize("kind", ["std", "mean", "leave_one_out", "gpg", "gdpo"])
def test_advantages_are_those_of_training(kind: str) -> None:
    rewards = ((1.0, 0.0, 0.0), (0.25,), (1.0, 1.0), (0.0, 0.5, 1.0, 1.0))
    rollouts = [
        rollout(prompt, [1], [2, 3], 1.0, reward=reward - 0.1 * i, terms=((0.5, reward), (0.5, reward * i)))
        for prompt, group in enumerate(rewards)
        for i, reward in enumerate(group)
    ]
    zeros = np.zeros(3 * len(rollouts))
    batch = AuditBatch(
        token_ids_L=zeros,
        response_mask_L=zeros > 0,
        rollout_logprobs_L=zeros,
        versions_L=zeros,
        lengths_B=np.full(len(rollouts), 3),
        prompt_ids_B=np.array([r.prompt_id for r in rollouts]),
        rewards_B=np.array([r.reward for r in rollouts]),
        scores_B=np.ones(len(rollouts)),
        terms=[[list(term) for term in r.terms] for r in rollouts],
        updates=1,
    )
    theirs = group_advantages(rollouts, kind).double().numpy()
    assert np.abs(advantages_of(batch, kind) - theirs).max() <= 1e-6 * np.abs(theirs).max()
    assert np.abs(theirs).max() > 0.3


def test_what_the_objective_needs_and_the_record_lacks_is_named() -> None:
    step, update = recorded(replaced(OBJECTIVES["tepo"], ref_beta=0.3), draw(1))
    without = {name: x for name, x in update.inputs.items() if name != "ref_logprob"}
    with pytest.raises(DataError, match="update 0: 'ref_logprob' was not recorded"):
        reference_terms(step, dataclasses.replace(update, inputs=without))
