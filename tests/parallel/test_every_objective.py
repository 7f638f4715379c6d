"""Every row of the table trains to the independent fp64 reference, through the whole model and on every layout.

A rollout batch goes through the product's own `learn`: rewards become advantages, the old pass is made, and of two minibatches
the second meets weights that the first has moved. The rollout log-probs differ from the old ones. The reference sees the same
tokens, rewards and rollout log-probs, and nothing else of the product but random keys (`tests/gate/reference.py`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import Config
from tepo_megatron.losses.advantages import OF_WHOLE_BATCH
from tests.gate import common
from tests.gate.data import Material, make_material
from tests.gate.reference import Trained
from tests.gate.world import Job, Outcome, distance, merged, run_jobs
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.objective_rows import VARIANTS
from tests.worlds import run_world

pytestmark = pytest.mark.slow

# a layout, and tokens of a microbatch
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "1 rank": ({}, 4096),
    "4 microbatches": ({}, 24),
    "TP2": ({"tp": 2}, 4096),
    "PP2": ({"pp": 2}, 40),
    "CP2": ({"cp": 2}, 40),
    "CP4": ({"cp": 4}, 70),
    "DP2": ({"dp": 2}, 24),
}
UPDATES = 2
TOLERANCE = 1e-5  # per tensor, ||a - b|| / ||b||; above it, twice what fp32 does to the reference itself on this CPU
# metric of the product -> share of the reference
SHARES = {"loss/clip_fraction": "clipped", "tepo/kl_mask_share": "masked", "weighting/affected_share": "weighted"}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    # with this seed every condition of every row acts, and no number is near a threshold
    return make_material(tmp_path_factory.mktemp("rows"), "qwen3", tied=True, layers=2, steps=1, seed=16)


@pytest.fixture(scope="module")
def expected(material: Material) -> dict[str, Trained]:
    return {name: common.expectation(v.config(material, {}, 4096), material, method=v.method) for name, v in VARIANTS.items()}


def _some_rows(layout: str) -> list[str]:
    """Return the third of the rows that this layout trains. Every row is in the third of a layout of several ranks."""
    first = list(LAYOUTS).index(layout)
    return list(VARIANTS)[first % 3 :: 3]


PARTS = [("1 rank", "every row"), *((name, part) for name in LAYOUTS if name != "1 rank" for part in ("a third", "every row"))]


@pytest.mark.parametrize(("name", "part"), full_but([("CP2", "a third")], [("PP2", "a third")], PARTS))
def test_every_row_trains_to_the_reference(material: Material, expected: dict[str, Trained], name: str, part: str) -> None:
    layout, max_tokens = LAYOUTS[name]
    rows = list(VARIANTS) if part == "every row" else _some_rows(name)
    configs = [VARIANTS[row].config(material, layout, max_tokens) for row in rows]
    ranks = run_world(configs[0].parallel.world_size, run_jobs, [Job(cfg, material.steps) for cfg in configs])
    found = {row: merged(of_ranks) for row, of_ranks in zip(rows, zip(*ranks, strict=True), strict=True)}
    wrong = [difference for row in rows if (difference := first_difference(found[row], expected[row], row, material))]
    assert not wrong, f"{len(wrong)} of {len(rows)} rows on {name}:\n" + "\n".join(wrong)


OWN_FILE = """
import torch
from tepo_megatron.losses.objective import Objective
from tepo_megatron.losses.surrogate import SURROGATES

def own_clip(ratio_R, logprob_R, old_logprob_R, advantage_R, bounds):
    clipped_R = ratio_R.clamp(1 - bounds.low, 1 + bounds.high)
    value_R = torch.minimum(ratio_R * advantage_R, clipped_R * advantage_R)
    return value_R, (ratio_R - clipped_R) * advantage_R > 0

SURROGATES["own_clip"] = own_clip
OWN = Objective(ratio="token", surrogate="own_clip", clip_low=0.2, clip_high=0.28, aggregate="token_mean")
"""


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Material, Trained]:
    """A model with layers for four virtual pipeline stages, and GRPO's reference on it."""
    material = make_material(tmp_path_factory.mktemp("deeper"), "qwen3", tied=True, layers=4, steps=1, seed=13)
    grpo = VARIANTS["grpo"]
    expected = common.expectation(grpo.config(material, {}, 4096), material, method=grpo.method)
    assert min(update.margin for update in expected.updates) >= common.MARGIN
    assert max(update.shares["clipped"] for update in expected.updates) >= 0.05
    return material, expected


@pytest.mark.parametrize("name", full_but(["CP2"], [], cases.LAYOUTS))
def test_an_objective_of_a_users_file_trains_to_the_reference(
    deeper: tuple[Material, Trained], tmp_path: Path, name: str
) -> None:
    """On the 13 layouts of TEPO's own test, several microbatches each."""
    file, (material, expected) = tmp_path / "mine.py", deeper
    file.write_text(OWN_FILE)
    cfg = VARIANTS["grpo"].config(material, cases.LAYOUTS[name], 70)
    cfg = replace(cfg, objective=replace(cfg.objective, name=f"{file}:OWN"))
    ranks = run_world(cfg.parallel.world_size, run_jobs, [Job(cfg, material.steps)])
    outcome = merged([of_rank for (of_rank,) in ranks])
    assert (difference := first_difference(outcome, expected, "grpo", material)) is None, difference


STREAMED = [name for name, variant in VARIANTS.items() if variant.method.advantage not in OF_WHOLE_BATCH]


@pytest.mark.parametrize("name", full_but([], [], LAYOUTS))
def test_every_row_streams_to_the_reference(material: Material, expected: dict[str, Trained], name: str) -> None:
    """With `training.stream: prompt` the updates are those of the whole batch, in whatever order the groups arrive."""
    layout, max_tokens = LAYOUTS[name]
    rows = STREAMED if name == "1 rank" else [row for row in _some_rows(name) if row in STREAMED]
    jobs = [Job(streamed(VARIANTS[row].config(material, layout, max_tokens)), material.steps) for row in rows]
    ranks = run_world(jobs[0].cfg.parallel.world_size, run_jobs, jobs)
    found = {row: merged(of_ranks) for row, of_ranks in zip(rows, zip(*ranks, strict=True), strict=True)}
    wrong = [difference for row in rows if (difference := first_difference(found[row], expected[row], row, material))]
    assert not wrong, f"{len(wrong)} of {len(rows)} rows on {name}:\n" + "\n".join(wrong)


def streamed(cfg: Config) -> Config:
    """Return the config with minibatches that are trained as they come."""
    rollout = replace(cfg.rollout, filter_uniform_groups=False)
    return replace(cfg, rollout=rollout, training=replace(cfg.training, stream="prompt"))


def fp32_tolerance(row: str, expected: Trained, update: int, name: str, material: Material) -> float:
    """Return twice what fp32 does to the reference's own gradient."""
    variant = VARIANTS[row]
    low = common.expectation(variant.config(material, {}, 4096), material, method=variant.method, dtype=torch.float32)
    return 2 * distance(low.updates[update].gradients[name].double(), expected.updates[update].gradients[name])


def first_difference(found: Outcome, expected: Trained, row: str, material: Material | None = None) -> str | None:
    """Describe the first difference; None where losses, gradients, norms and shares of all updates are the reference's.

    Without the material the bound of gradients is TOLERANCE.
    """
    assert len(found.gradients) == len(expected.updates) == UPDATES
    for i, update in enumerate(expected.updates):
        said = f"{row}, update {i}:"
        if abs(found.losses[i] - update.loss) > TOLERANCE * max(1.0, abs(update.loss)):
            return f"{said} loss {found.losses[i]} instead of {update.loss}"
        assert found.gradients[i].keys() == update.gradients.keys()
        apart = {n: distance(found.gradients[i][n], g) for n, g in update.gradients.items()}
        worst = max(apart, key=apart.__getitem__)
        if not apart[worst] <= TOLERANCE and not (
            material and apart[worst] <= fp32_tolerance(row, expected, i, worst, material)
        ):
            return f"{said} the gradient of {worst} is off by {apart[worst]:.1e}"
        for metric, share in SHARES.items():
            numerator, denominator = found.metrics[i][metric]
            if denominator and numerator / denominator != pytest.approx(update.shares[share], abs=1e-6):
                return f"{said} {metric} is {numerator / denominator} instead of {update.shares[share]}"
    return None


CONDITIONS = {
    "clipped": lambda m: (
        (m.surrogate in ("clip", "clip_eq4", "stop_gradient", "clip_tokens") and m.clip_high < 1) or m.max_divergence > 0
    ),
    "masked": lambda m: m.kl_mask != "none",
    "weighted": lambda m: m.weighting != "none",
    "corrected": lambda m: m.correction != "none",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_batch_triggers_every_condition_of_a_row(expected: dict[str, Trained], name: str) -> None:
    """Each of its conditions acts in one of the updates, and no number lies so near to a threshold that fp32 may differ."""
    updates, method = expected[name].updates, VARIANTS[name].method
    assert min(u.margin for u in updates) >= common.MARGIN
    for condition, acts in CONDITIONS.items():
        if acts(method):
            assert max(u.shares[condition] for u in updates) >= 0.05, condition
    assert all(g.norm() > 0 for u in updates for g in u.gradients.values())
