"""`python -m benchmarks.curves` distinguishes runs that learn alike from others."""

import numpy as np
import pytest

from benchmarks.curves import table
from tepo_megatron.ablation.results import RunOutcome
from tepo_megatron.evaluation import Scores
from tepo_megatron.report.drawing import Curves

STEPS = 20


def outcome(seed: int, gain: float, noise: float) -> RunOutcome:
    """A run whose accuracy rises to 0.8 + gain."""
    generator = np.random.default_rng(seed)
    accuracy = np.linspace(0.2, 0.8, STEPS) + gain + noise * generator.standard_normal(STEPS)
    records = [
        {"step": i + 1, "accuracy/mean": x, "actor/entropy": 0.1 + 0.001 * seed, "tepo/kl_mask_share": 0.5 + 0.01 * seed}
        for i, x in enumerate(accuracy.tolist())
    ]
    after = float(accuracy[-1])
    return RunOutcome(Curves(records), Scores({0: 0.2, 1: 0.3}, {0: after, 1: after}))


@pytest.mark.parametrize(("gain", "verdict"), [(0.0, "within noise"), (0.1, "beyond noise")])
def test_a_difference_is_distinguished_from_noise(gain: float, verdict: str) -> None:
    first = {seed: outcome(seed, 0.0, 0.02) for seed in range(4)}
    second = {seed: outcome(100 + seed, gain, 0.02) for seed in range(4)}
    lines = table(first, second, ("a", "b")).splitlines()
    assert lines[0].startswith("|  | a, seeds 0, 1, 2, 3 | b |")
    rows = {line.split(" | ")[0].strip("| "): line for line in lines[2:8]}
    assert rows["held-out accuracy before"].endswith("| +0.0000 [+0.0000, +0.0000] | within noise |")
    assert verdict in rows["accuracy of the rollouts, all steps"] and verdict in rows["held-out accuracy after"]
    inside = int(lines[-1].split(" of 20 steps")[0].rpartition(" ")[2])
    assert inside >= 16 if gain == 0 else inside <= 4


def test_only_common_seeds_count() -> None:
    first = {seed: outcome(seed, 0.0, 0.02) for seed in (0, 1, 2)}
    second = {seed: outcome(seed, 0.0, 0.02) for seed in (1, 2, 3)}
    said = table(first, second, ("a", "b"))
    assert "a, seeds 1, 2 |" in said and "covers 0 in 20 of 20 steps" in said
