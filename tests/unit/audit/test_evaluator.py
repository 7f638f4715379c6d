"""The audit's loss is that of the tests' own fp64 reference, token decisions included, for every objective."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from tepo_megatron.audit.evaluator import Comparisons, evaluate, group_advantages
from tepo_megatron.audit.reading import AuditBatch
from tepo_megatron.errors import DataError
from tepo_megatron.losses import OBJECTIVES, Objective, objective_of
from tepo_megatron.losses.advantages import group_advantages as advantages_of_training
from tepo_megatron.losses.objective import CHOICES
from tests.audit_runs import recorded
from tests.objective_cases import Batch, draw, fair_cases, method_of, replaced
from tests.report_runs import rollout

COVARIANCES = {"cov_share": 0.2, "cov_low": 0.02, "cov_high": 5.0}
COMBINED: dict[str, Objective] = {
    "grpo, dual clip": OBJECTIVES["grpo"].replace(dual_clip=1.4),
    "grpo, icepop": replaced(OBJECTIVES["grpo"], correction="icepop"),
    "gspo, sequence_mis": replaced(OBJECTIVES["gspo"], correction="sequence_mis"),
    "tepo, geometric_mask": replaced(OBJECTIVES["tepo"], correction="geometric_mask"),
    "gmpo, tis": replaced(OBJECTIVES["gmpo"], correction="tis"),
    "prefix_is, clip_cov": replaced(OBJECTIVES["prefix_is"], weighting="clip_cov", **COVARIANCES),
    "tepo, steer": replaced(OBJECTIVES["tepo"], weighting="steer", steer_lambda_min=0.5),
    "tepo, prompt mean": OBJECTIVES["tepo"].replace(aggregate="prompt_mean_token_mean"),
    **{f"tepo, {kl} to both": replaced(OBJECTIVES["tepo"], kl=kl, kl_mask="both", beta=0.7, ref_beta=0.3, ref_kl=kl)
       for kl in ("k1", "k2", "k3", "k3_importance_weighted", "abs")},
}  # fmt: skip
CASES = {name: row.replace(beta=0.5 if row.beta else None) for name, row in OBJECTIVES.items()} | COMBINED
DRAWS: dict[str, Callable[[int], Batch]] = {"moderate": draw, "extreme": lambda seed: draw(seed, extreme=True)}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_references(name: str) -> None:
    objective = CASES[name]
    assert objective_of(dataclasses.asdict(objective)) == objective
    for kind in DRAWS if objective.surrogate not in ("trust_region_tv", "trust_region_kl") else ("moderate",):
        for batch, (outcome, _, _) in fair_cases(method_of(objective), 3, DRAWS[kind]):
            terms, near_N = evaluate(*recorded(objective, batch))
            assert abs(terms["loss"].sum() - outcome.loss.item()) <= 1e-10 * max(1.0, outcome.magnitude), kind
            assert terms["clipped"].mean() == pytest.approx(outcome.shares["clipped"], abs=1e-12)
            assert terms["kl_mask"].mean() == pytest.approx(outcome.shares["masked"], abs=1e-12)
            assert not near_N.any(), "the cases keep clear of every threshold"


def test_tokens_at_a_threshold_are_marked() -> None:
    compare = Comparisons(np.zeros(6, dtype=bool))
    above = compare.above(np.array([1.2, 1.2 + 1e-6, 1.2 - 1e-6, 1.21, 0.5, -1.2]), 1.2)
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
        *(zeros, zeros > 0, zeros, zeros, np.full(len(rollouts), 3)),
        prompt_ids_B=np.array([r.prompt_id for r in rollouts]),
        rewards_B=np.array([r.reward for r in rollouts]),
        scores_B=np.ones(len(rollouts)),
        terms=[[list(term) for term in r.terms] for r in rollouts],
        updates=1,
    )
    theirs = advantages_of_training(rollouts, kind).double().numpy()
    assert np.abs(group_advantages(batch, kind) - theirs).max() <= 1e-6 * np.abs(theirs).max()
    assert np.abs(theirs).max() > 0.3


def test_what_the_objective_needs_and_the_record_lacks_is_named() -> None:
    step, update = recorded(CASES["tepo, k3 to both"], draw(1))
    without = {name: x for name, x in update.inputs.items() if name != "ref_logprob"}
    with pytest.raises(DataError, match="update 0: 'ref_logprob' was not recorded"):
        evaluate(step, dataclasses.replace(update, inputs=without))


def test_every_objective_and_every_part_is_a_case() -> None:
    assert set(OBJECTIVES) <= set(CASES)
    for part in ("ratio", "surrogate", "kl", "kl_mask", "aggregate"):
        assert {getattr(objective, part) for objective in CASES.values()} == set(CHOICES[part]), part
    for part in ("weighting", "correction"):
        assert {getattr(objective, part).type for objective in CASES.values()} == set(CHOICES[f"{part}.type"]), part
    used = set(itertools.chain.from_iterable(evaluate(*recorded(o, draw(1)))[0] for o in CASES.values()))
    assert {"weight", "penalty", "correction", "ref_kl"} <= used
