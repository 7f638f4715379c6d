"""The objectives do what their own formulas require, in cases that can be worked out by hand."""

import math

import pytest
import torch

from tepo_megatron.losses import OBJECTIVES
from tests.objective_cases import Batch, ours, replaced
from tests.reference.minibatches import Response


def one_response(advantage: float, log_ratios: list[float], **parts: list[float]) -> Batch:
    """A single response whose old log-probs are -4; the other policies agree with the old one, entropies are all 1."""
    n = len(log_ratios)
    old = [-4.0] * n
    response = Response(advantage, old, [1.0] * n, parts.get("rollout", old), parts.get("ref", old), list(range(n)))
    return Batch([response], torch.tensor(log_ratios, dtype=torch.float64) - 4, torch.ones(n).double())


def test_reference_kl_pulls_towards_the_reference_alone() -> None:
    """k3 at l - l_ref: gradient 1 - exp(l_ref - l), zero where the policies agree."""
    batch = one_response(0.0, [0.0, 0.0], ref=[-4.0, -3.0])
    _, grad, _ = ours(replaced(OBJECTIVES["grpo"], ref_beta=0.5), batch)
    assert grad.tolist() == pytest.approx([0.0, 0.5 * (1 - math.e) / 2], rel=1e-12)
    _, grad, _ = ours(replaced(OBJECTIVES["grpo"], ref_beta=0.5, ref_kl_in="reward"), batch)
    assert grad.tolist() == [0.0, 0.0]
