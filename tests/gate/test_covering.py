"""Every pair of training switches trains to the fp64 reference, or is refused by config with the reason."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tepo_megatron.config.megatron import TESTED
from tests.gate import common, covering, plan, recipes
from tests.gate.data import make_material
from tests.gate.world import Job, merged, run_jobs
from tests.marks import full_but
from tests.worlds import run_world

ROWS, REFUSALS = covering.array()
HYBRID_ROWS, HYBRID_REFUSALS = covering.array(hybrid=True)
# all pairs that config refuses; a new pair in this list was trained before
REFUSED = {
    "tp=1 with sequence_parallel=True": "sequence_parallel=true needs tp > 1",
    "pp=1 with vpp=2": "vpp=2 needs pp > 1",
    "ep=2 with experts=False": "the model has no experts",
    "gradient_accumulation_fusion=True with offload_activations=True": "hide the parameter from the fused",
    "correction=tis with old_logprobs=rollout": "nothing to correct",
    "correction=geometric_mask with old_logprobs=rollout": "nothing to correct",
    "correction=icepop with old_logprobs=rollout": "nothing to correct",
    "colocate=True with stream=prompt": "they take turns",
}


def test_every_pair_is_in_a_row_or_refused() -> None:
    covered = {pair for row in ROWS for pair in covering.pairs_of(row)}
    refused = {refusal.pair for refusal in REFUSALS}
    assert covered | refused == set(covering.all_pairs()) and not covered & refused
    assert all(covering.ranks(row) <= plan.RANKS and covering.refusal(row) is None for row in ROWS)


def test_every_pair_of_a_hybrid_is_in_a_row_or_refused() -> None:
    covered = {pair for row in HYBRID_ROWS for pair in covering.pairs_of(row)}
    refused = {refusal.pair for refusal in HYBRID_REFUSALS}
    assert covered | refused == set(covering.all_pairs(hybrid=True)) and not covered & refused
    assert {covering.words_of(pair) for pair in refused} == REFUSED.keys() - {"ep=2 with experts=False"}
    said = covering.refusal({**HYBRID_ROWS[0], "share_prompts": "always"})
    assert said is not None and "the gated delta rule" in said


def test_what_is_refused_and_why() -> None:
    found = {covering.words_of(refusal.pair): refusal.reason for refusal in REFUSALS}
    assert found.keys() == REFUSED.keys()
    for pair, reason in REFUSED.items():
        assert reason in found[pair], pair


@pytest.mark.parametrize("number", full_but([1], [3, 6], range(len(ROWS))))
def test_a_row_trains_to_the_reference(number: int, tmp_path: Path) -> None:
    check_row(ROWS[number], tmp_path)


@pytest.mark.parametrize("number", full_but([], [1], range(len(HYBRID_ROWS))))
def test_a_hybrid_trains_to_the_reference(number: int, tmp_path: Path) -> None:
    check_row(HYBRID_ROWS[number], tmp_path)


def check_row(row: covering.Row, tmp_path: Path) -> None:
    family, tied = covering.family_of(row)
    truncated = row["truncation"] != "none"
    material = make_material(tmp_path, family, tied=tied, layers=covering.LAYERS, steps=1, truncated=truncated)
    cfg = covering.config_of(row, str(material.model), str(material.other))
    steps = material.steps
    if row["truncation"] == "actor":
        steps = tuple(tuple(replace(r, sampling_mask=None) for r in rollouts) for rollouts in steps)
    job = Job(cfg, steps, fixed_length=row["fixed_length"])
    found = merged([of_rank[0] for of_rank in run_world(covering.ranks(row), run_jobs, [job])])
    expected = common.expectation(cfg, material, found.gradients)
    what = covering.describe(row)
    in_fp32 = partial(common.expectation, cfg, material, found.gradients, dtype=torch.float32)
    common.check_equal(found, expected, what, in_fp32)
    assert found.buckets > 1 or row["overlap"] == "none", f"{what}: there is nothing to overlap"


def test_the_fields_of_megatron_that_are_tested_are_those_of_recipes_and_rows() -> None:
    """`tepo doctor` calls all others untested."""
    shipped = [recipe.cfg for recipe in recipes.shipped()]
    for section, tested in TESTED.items():
        found = {name for cfg in [*shipped, *map(covering.config_of, ROWS)] for name in getattr(cfg.megatron, section)}
        assert found == tested, section
