"""Every row of the table is the method of its name: the numbers of its paper, and the reference's loss and gradients."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from tepo_megatron.base.types import Rollout
from tepo_megatron.losses import OBJECTIVES
from tepo_megatron.losses.advantages import group_advantages, penalized
from tepo_megatron.losses.kl import ESTIMATORS
from tepo_megatron.report.audit import advantages as reference
from tepo_megatron.report.audit.reference import Formula
from tepo_megatron.rewards.terms import OverlongShaping
from tests.objective_cases import Batch, compare, draw, fair_cases, method_of, replaced
from tests.reference.methods import METHODS
from tests.reference.minibatches import shares
from tests.reference.rewards import overlong_penalty, reward_towards_reference

# instead of a row's own coefficients and shares, so that no part drowns in another and more than one token is chosen
LARGER = {"beta": 0.5, "entropy_coefficient": 0.1, "advantage_alpha": 0.4, "cov_share": 0.2}


def larger(parts: dict[str, Any]) -> dict[str, Any]:
    return parts | {k: math.copysign(v, parts[k]) for k, v in LARGER.items() if parts.get(k)}


def moving(seed: int) -> Batch:
    """Some responses move by less than GSPO's bounds; every third batch holds extreme log-ratios."""
    return draw(seed, tiny=True, extreme=seed % 3 == 2)


def test_every_row_has_a_method_spelled_out() -> None:
    assert OBJECTIVES.keys() == METHODS.keys()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_numbers_of_a_row(name: str) -> None:
    found = method_of(OBJECTIVES[name])
    assert {k: getattr(found, k) for k in METHODS[name]} == METHODS[name]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_computes_its_method(name: str) -> None:
    """The method is built from the reference's table alone, so that a part that only the row has shows."""
    for batch, theirs in fair_cases(Formula(**METHODS[name]), 6, moving):
        compare(OBJECTIVES[name], batch, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_with_larger_coefficients(name: str) -> None:
    parts = larger(METHODS[name])
    objective = replaced(OBJECTIVES[name], **{k: v for k, v in parts.items() if k in LARGER and v})
    for batch, theirs in fair_cases(Formula(**parts), 6, moving):
        compare(objective, batch, theirs)


def share(parts: dict[str, Any], name: str) -> float:
    """The mean share of tokens that a condition touches in the cases of these tests."""
    cases = list(fair_cases(Formula(**parts), 6, moving))
    return sum(shares(theirs[0])[name] for _, theirs in cases) / len(cases)


LEAST = {"clip_cov": 0.005, "cispo": 0.005, "dppo": 0.03, "dppo_kl": 0.03}
CLIPPED = {n: LEAST.get(n, 0.1) for n, m in METHODS.items() if "clip_high" in m or "max_divergence" in m}
MASKED = {n: 0.1 for n, m in METHODS.items() if m.get("kl_mask", "none") not in ("none", "all")}
WEIGHTED = {"clip_cov": 0.03, "kl_cov": 0.15, "steer": 0.1}


@pytest.mark.parametrize(
    ("condition", "name", "least"),
    [("clipped", *x) for x in CLIPPED.items()]
    + [("masked", *x) for x in MASKED.items()]
    + [("weighted", *x) for x in WEIGHTED.items()],
)
@pytest.mark.slow
def test_the_cases_put_a_row_to_the_test(condition: str, name: str, least: float) -> None:
    """Clipping, the KL mask and the weights each act on some tokens (at least that share) and not on others (a tenth)."""
    assert least <= share(larger(METHODS[name]), condition) <= 0.9


REWARDS = [[1.0, 0.0, 0.0, 0.5], [0.25, 0.25, 0.25], [1.0], [0.0, 1.0], [-0.5, 1.0, 0.3, 0.2, 0.9]]


def rollouts(rewards: list[list[float]]) -> list[Rollout]:
    ids, mask = torch.tensor([1, 2]), torch.tensor([False, True])
    return [Rollout(p, ids, mask, torch.zeros(2), 0, "stop", reward=r, score=r) for p, g in enumerate(rewards) for r in g]


@pytest.mark.parametrize("kind", ["std", "mean", "leave_one_out", "gpg", "gdpo", "none"])
@pytest.mark.parametrize("rewards", [REWARDS, REWARDS[1:3]], ids=["mixed", "silent"])
def test_group_advantages(kind: str, rewards: list[list[float]]) -> None:
    got = group_advantages(rollouts(rewards), kind).tolist()
    assert got == pytest.approx(reference.group_advantages(kind, rewards), rel=1e-6, abs=1e-7)


TERMS = [[[1.0, 0.2], [0.0, 0.1], [1.0, 0.9]], [[0.0, 0.0], [0.0, 0.5]], [[1.0, 0.3]]]


@pytest.mark.parametrize("shaping", [0.0, -0.5])
def test_gdpo_normalises_every_term_in_its_group(shaping: float) -> None:
    """The penalty that shaping adds to one of the responses is a term of its own."""
    weights, more = [1.0, 0.25], [[0.0] * len(g) for g in TERMS]
    more[0][1] = shaping
    graded = [
        dataclasses.replace(
            rollout,
            terms=tuple(zip(weights, values, strict=True)),
            reward=sum(w * v for w, v in zip(weights, values, strict=True)) + extra,
        )
        for rollout, values, extra in zip(
            rollouts([[0.0] * len(g) for g in TERMS]), itertools.chain(*TERMS), itertools.chain(*more), strict=True
        )
    ]
    terms = [[list(zip(weights, values, strict=True)) for values in g] for g in TERMS]
    rewards = [
        [sum(w * v for w, v in own) + x for own, x in zip(g, extra, strict=True)] for g, extra in zip(terms, more, strict=True)
    ]
    expected = reference.group_advantages("gdpo", rewards, terms)
    assert group_advantages(graded, "gdpo").tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_advantages_after_a_reference_kl_in_the_reward(kind: str, extreme: bool) -> None:
    """r - ref_beta sum KL(l_old - l_ref), before the groups are compared."""
    responses = draw(3, (3, 1, 12, 5, 2, 7), extreme=extreme).responses
    rewards = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0]
    method = Formula("token", ref_kl=kind, ref_beta=0.1, ref_kl_in="reward")
    shaped = [reward_towards_reference(method, r, s) for r, s in zip(rewards, responses, strict=True)]
    expected = reference.group_advantages("std", [shaped[:3], shaped[3:]])
    apart = [torch.tensor(s.old).double() - torch.tensor(s.ref).double() for s in responses]
    penalty = [0.1 * ESTIMATORS[kind](x, torch.zeros_like(x)).sum() for x in apart]
    got = group_advantages(penalized(rollouts([rewards[:3], rewards[3:]]), torch.stack(penalty)), "std")
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("penalty", [1.0, 0.5])
def test_overlong_penalty(penalty: float) -> None:
    """DAPO's own numbers: a limit of 20480 tokens, of which the last 4096 cost."""
    shaping = OverlongShaping(20480, 4096, penalty)
    for tokens in (0, 1, 16383, 16384, 16385, 18432, 20479, 20480):
        assert shaping.term(tokens) == pytest.approx(overlong_penalty(tokens, 20480, 4096, penalty), rel=1e-12)
    assert shaping.term(18432) == -penalty / 2 and shaping.term(20480) == -penalty
