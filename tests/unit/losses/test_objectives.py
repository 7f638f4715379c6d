"""The objectives do what their own formulas require, in cases that can be worked out by hand."""

import dataclasses
import math

import pytest
import torch

from tepo_megatron.config.objective import ClipCov
from tepo_megatron.losses import OBJECTIVES, Objective
from tepo_megatron.losses.ratio import sequence_ratio
from tepo_megatron.losses.surrogate import SURROGATES, ClipBounds
from tests.objective_cases import Batch, draw, inputs_of, ours, replaced
from tests.reference.minibatches import Response


def one_response(advantage: float, log_ratios: list[float], **parts: list[float]) -> Batch:
    """A single response whose old log-probs are -4; the other policies agree with the old one, entropies are all 1."""
    n = len(log_ratios)
    old = [-4.0] * n
    response = Response(advantage, old, [1.0] * n, parts.get("rollout", old), parts.get("ref", old), list(range(n)))
    return Batch([response], torch.tensor(log_ratios, dtype=torch.float64) - 4, torch.ones(n).double())


@pytest.mark.parametrize("surrogate", ["clip", "clip_eq4", "unclipped", "stop_gradient"])
def test_both_forms_of_the_sequence_ratio_have_one_gradient(surrogate: str) -> None:
    """The stop-gradient form, which needs no collective in backward, is exact while A is constant over a sequence."""
    batch = draw(3)
    inputs = inputs_of(batch)
    objective = Objective(ratio="sequence", surrogate=surrogate)
    grads = []
    for constant_factors in (True, False):
        x = batch.logprob.clone().requires_grad_()
        ratio = sequence_ratio(x - inputs.old_logprob_R, inputs.segments, constant_factors)
        bounds = ClipBounds(objective.clip_low, objective.clip_high)
        value, _ = SURROGATES[surrogate](ratio, x, inputs.old_logprob_R, inputs.advantage_R, bounds)
        value.sum().backward()
        grads.append(x.grad)
    assert grads[0].norm() > 0
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-13)


def test_ratio_one_weighs_early_tokens_more_under_a_prefix_ratio() -> None:
    """Token j moves the ratios of all tokens from j on: dJ/dl_j = A / N sum_{t>=j} 1/t."""
    _, grad, _ = ours(OBJECTIVES["prefix_is"], one_response(1.5, [0.0, 0.0, 0.0]))
    expected = [1.5 / 3 * x for x in (1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3)]
    assert (-grad).tolist() == pytest.approx(expected, rel=1e-12)


def test_eq4_to_the_letter_lets_a_wrong_answer_grow() -> None:
    """Eq. 4 has no gradient where A < 0 and w > 1 + eps; the pessimistic clip pushes down."""
    batch = one_response(-1.0, [0.5, 0.5, 0.5])
    _, eq4, _ = ours(OBJECTIVES["tepo_eq4"], batch)
    _, pessimistic, _ = ours(OBJECTIVES["tepo"], batch)
    assert eq4.abs().max() == 0 and (pessimistic > 0).all()


def test_clip_cov_drops_the_smallest_keys_among_its_candidates() -> None:
    """Two of six tokens lie in the range; the share allows one of them, the one with the smaller key."""
    right = Response(1.0, [-4.0] * 3, [1.0] * 3, [-4.0] * 3, [-4.0] * 3, [5, 4, 3])
    wrong = Response(-1.0, [-4.0] * 3, [1.0] * 3, [-4.0] * 3, [-4.0] * 3, [2, 1, 0])
    # l - mean l = 2, 2, -1 and -1, -1, -1; A = 1 and -1: covariances 2, 2, -1 and 1, 1, 1, of which those at 1 are not above it
    logprob = torch.tensor([-1.0, -1.0, -4.0, -4.0, -4.0, -4.0], dtype=torch.float64)
    objective = Objective(ratio="none", surrogate="reinforce", weighting=ClipCov(share=0.2))
    _, grad, _ = ours(objective, Batch([right, wrong], logprob, torch.ones(6).double()))
    assert (-6 * grad).tolist() == [1, 0, 1, -1, -1, -1]


@pytest.mark.parametrize("advantage", [1.0, 0.001])
def test_steer_spares_tokens_that_hardly_move_the_entropy(advantage: float) -> None:
    """Omega = A r (1 - pi)(ln pi + H), here at r = 1 and H = 1; k is set by its maximum, but by 0.02 where that is smaller."""
    batch = one_response(advantage, [0.0, 0.0])
    batch = dataclasses.replace(batch, entropy=torch.tensor([1.0, 3.5], dtype=torch.float64))
    omega = [advantage * (1 - math.exp(-4)) * abs(h - 4) for h in (1.0, 3.5)]
    k = -math.log(0.8) / max(omega[0], 0.02)
    _, grad, _ = ours(OBJECTIVES["steer"], batch)
    assert (-2 * grad / advantage).tolist() == pytest.approx([math.exp(-k * o) for o in omega], rel=1e-12)


def test_reference_kl_pulls_towards_the_reference_alone() -> None:
    """k3 at l - l_ref: gradient 1 - exp(l_ref - l), zero where the policies agree."""
    batch = one_response(0.0, [0.0, 0.0], ref=[-4.0, -3.0])
    _, grad, _ = ours(replaced(OBJECTIVES["grpo"], ref_beta=0.5), batch)
    assert grad.tolist() == pytest.approx([0.0, 0.5 * (1 - math.e) / 2], rel=1e-12)
    _, grad, _ = ours(replaced(OBJECTIVES["grpo"], ref_beta=0.5, ref_kl_in="reward"), batch)
    assert grad.tolist() == [0.0, 0.0]
