"""Bias of the KL estimators under samples of the old policy: exact sums over a vocabulary, in fp64.

The table of docs/paper.md is made by `python -m tests.unit.losses.test_estimators`.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tepo_megatron.losses.kl import ESTIMATORS

ACTIONS, SEEDS = 32, range(8)
DIVERGENCES = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0)  # nats, KL(pi || pi_old)
SHOWN = (0.001, 0.1, 2.0)
PAGE = Path("docs/paper.md")


def divergence(phi: Tensor, old: Tensor) -> Tensor:
    """Return KL(softmax(phi) || softmax(old)) in nats."""
    logp, logq = phi.log_softmax(-1), old.log_softmax(-1)
    return (logp.exp() * (logp - logq)).sum()


def policies(seed: int, target: float) -> tuple[Tensor, Tensor]:
    """Return random logits of a policy, and those of an old policy from which its KL is `target` nats."""
    generator = torch.Generator().manual_seed(seed)
    phi, direction = 1.5 * torch.randn(2, ACTIONS, generator=generator, dtype=torch.float64)
    low, high = 0.0, 20.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if divergence(phi, phi + middle * direction) < target else (low, middle)
    return phi, phi + low * direction


def gradient(function: Callable[[Tensor], Tensor], phi: Tensor) -> tuple[float, Tensor]:
    """Return the value of a function of the logits, and its gradient."""
    x = phi.clone().requires_grad_()
    value = function(x)
    value.backward()
    assert x.grad is not None
    return value.item(), x.grad


def bias(name: str, target: float, seed: int, of: str = "old") -> tuple[float, float, float]:
    """Return the estimator's mean over the KL, the same of the gradients' norms, and the cosine between the gradients."""
    phi, old = policies(seed, target)
    weights = {"old": old, "pi": phi}[of].softmax(-1)

    def mean(x: Tensor) -> Tensor:
        log_ratio = x.log_softmax(-1) - old.log_softmax(-1)
        return (weights * ESTIMATORS[name](log_ratio, log_ratio)).sum()

    value, slope = gradient(mean, phi)
    exact, right = gradient(lambda x: divergence(x, old), phi)
    return value / exact, float(slope.norm() / right.norm()), float(slope @ right / (slope.norm() * right.norm()))


@pytest.mark.parametrize("target", DIVERGENCES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_default_is_unbiased_under_samples_of_the_old_policy(target: float, seed: int) -> None:
    value, size, cosine = bias("k3_importance_weighted", target, seed)
    assert (value, size, cosine) == pytest.approx((1, 1, 1), abs=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_k3_is_biased_under_samples_of_the_old_policy(seed: int) -> None:
    """It is KL(pi || pi_old) under samples of pi alone. Under those of the old policy it is too large or too small."""
    value, _, cosine = bias("k3", 2.0, seed)
    assert abs(value - 1) > 0.1 and cosine < 0.9
    assert bias("k3", 2.0, seed, of="pi")[0] == pytest.approx(1, abs=1e-9)
    assert bias("k3", 0.001, seed)[0] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target", DIVERGENCES)
def test_k1_as_a_penalty_pushes_away_from_the_old_policy(target: float, seed: int) -> None:
    """Under samples of the old policy it is -KL(pi_old || pi), so that it is largest where the policies agree."""
    phi, old = policies(seed, target)
    value, _, cosine = bias("k1", target, seed)
    assert value * target == pytest.approx(-float(divergence(old, phi)), rel=1e-6)
    assert cosine < 0


def rows() -> list[str]:
    """Return the rows of the table in docs/paper.md: means over the seeds."""
    found = []
    for name in ESTIMATORS:
        means = [torch.tensor([bias(name, target, seed) for seed in SEEDS]).mean(0).tolist() for target in SHOWN]
        found.append(f"| `{name}` | " + " | ".join(" / ".join(f"{x:.2f}" for x in mean) for mean in means) + " |")
    return found


def test_the_page_has_the_table() -> None:
    assert re.findall(r"^\| `(?:k\d|abs)[^\n]*\|$", PAGE.read_text(), re.MULTILINE) == rows()


if __name__ == "__main__":
    print("\n".join(rows()))
