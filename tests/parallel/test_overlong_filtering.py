"""Overlong filtering (`objective.mask_truncated`) trains to the fp64 reference, through the whole model and on every layout."""

from dataclasses import replace
from typing import Any

import pytest

from tests.gate import common
from tests.gate.data import Material, make_material
from tests.gate.reference import Trained
from tests.gate.world import Job, merged, run_jobs
from tests.marks import full_but
from tests.parallel.objective_rows import LARGER, Variant
from tests.parallel.test_every_objective import LAYOUTS, first_difference
from tests.worlds import run_world

pytestmark = pytest.mark.slow

CUT = (2, 3, 7, 9)  # samples that were cut off: the longest of group 0, one of each other group
# one row of each way to divide: by tokens, by sequences, by the maximum length; and one that needs whole sequences
PARTS: dict[str, dict[str, Any]] = {
    "tepo": {"beta": LARGER["beta"]},
    "dapo": {},
    "grpo": {"ref_beta": 0.3},
    "dr_grpo": {},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
}
ROWS = {name: Variant(name, {"mask_truncated": True} | parts, {}) for name, parts in PARTS.items()}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    made = make_material(tmp_path_factory.mktemp("overlong"), "qwen3", tied=True, layers=2, steps=1)
    steps = (tuple(replace(r, stop_reason="length" if i in CUT else "stop") for i, r in enumerate(step)) for step in made.steps)
    return replace(made, steps=tuple(steps))


@pytest.fixture(scope="module")
def expected(material: Material) -> dict[str, Trained]:
    return {name: common.expectation(row.config(material, {}, 4096), material, method=row.method) for name, row in ROWS.items()}


@pytest.mark.parametrize("layout", full_but(["CP2"], ["PP2"], list(LAYOUTS)))
def test_cut_off_responses_train_nothing(material: Material, expected: dict[str, Trained], layout: str) -> None:
    parallel, max_tokens = LAYOUTS[layout]
    configs = [row.config(material, parallel, max_tokens) for row in ROWS.values()]
    ranks = run_world(configs[0].parallel.world_size, run_jobs, [Job(cfg, material.steps) for cfg in configs])
    found = dict(zip(ROWS, map(merged, zip(*ranks, strict=True)), strict=True))
    wrong = [said for row in ROWS if (said := first_difference(found[row], expected[row], row))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("row", ROWS)
def test_the_filter_changes_what_is_trained(material: Material, expected: dict[str, Trained], row: str) -> None:
    parts = {**ROWS[row].parts, "mask_truncated": False}
    plain = replace(ROWS[row], parts=parts)
    unfiltered = common.expectation(plain.config(material, {}, 4096), material, method=plain.method)
    assert all(
        a.loss != pytest.approx(b.loss, rel=1e-3) for a, b in zip(unfiltered.updates, expected[row].updates, strict=True)
    )
