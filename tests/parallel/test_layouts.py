"""Two consecutive optimizer steps of TEPO are the same on every layout, and those of the independent fp64 reference."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.cases import LAYOUTS
from tests.worlds import run_world


@pytest.fixture(scope="module")
def tied(case: cases.Case) -> cases.Case:
    return case


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> cases.Case:
    return cases.make_case(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> cases.Case:
    return cases.make_case(tmp_path_factory.mktemp("shared"), tied=True, shared=True)


def check(
    case: cases.Case, layout: dict, batches=None, max_tokens: int = 4096, objective: dict | None = None, **training
) -> None:
    """Run the steps on `layout` and compare loss, gradient norm, every gradient and every weight with the reference."""
    cfg = cases.run_config(case.model, layout, max_tokens, objective, **training)
    ranks = run_world(cfg.parallel.world_size, cases.train_steps, cfg, batches or case.batches)
    cases.compare(ranks, case.steps, partial(cases.reference_steps, case.model, case.batches, torch.float32))
    for i, rank in itertools.product(range(cases.STEPS), ranks):
        assert (rank[i]["metrics"]["packing/shared_share"][0] > 0) == (cfg.training.share_prompts == "always")


def test_the_case_tests_something(tied: cases.Case) -> None:
    """Clipping on both sides, a KL mask that is neither empty nor full, weights that move, sequences of one token."""
    for step in tied.steps:
        assert step.clipped_high >= 0.2 and step.clipped_low >= 0.2
        assert 0.3 <= step.mask_share <= 0.7
    assert 1 in cases.RESPONSES
    before = cases.reference.load(tied.model).state_dict()
    moved = {n: cases.distance(w, before[n]) for n, w in tied.steps[-1].weights.items()}
    assert min(moved.values()) > 1e-4
    lengths = [r.token_ids_L.numel() for r in tied.batches[0].rollouts]
    assert sum(n > 8 for n in lengths) >= 6  # more than one token per half chunk at CP4: they straddle its ranks


@pytest.mark.parametrize(
    "name", full_but(["1 rank", "PP2 VPP2", "DP2", "CP2 TP2"], ["TP2+SP", "CP4", "CP2 TP2+SP", "CP2 PP2"], LAYOUTS)
)
def test_layout_equals_reference(tied: cases.Case, name: str) -> None:
    check(tied, LAYOUTS[name])


@pytest.mark.parametrize("name", full_but([], ["PP2"], ["1 rank", "TP2+SP", "PP2", "CP2 TP2"]))
def test_untied_embeddings_train_to_the_reference(untied: cases.Case, name: str) -> None:
    check(untied, LAYOUTS[name])


@pytest.mark.parametrize(
    ("embeddings", "name"),
    full_but([], [("tied", "1 rank")], itertools.product(["tied", "untied"], ["1 rank", "TP2", "CP2 TP2+SP", "TP2 PP2"])),
)
def test_output_layer_in_chunks(request: pytest.FixtureRequest, name: str, embeddings: str) -> None:
    """Fuse the output layer with the token statistics, in microbatches, and with a budget that keeps no logits."""
    check(request.getfixturevalue(embeddings), LAYOUTS[name], max_tokens=80, logits_budget_mib=0)


SHARING = [
    *((name, 4096, {}) for name in LAYOUTS), ("1 rank", 40, {}), ("CP2", 64, {}), ("PP2 VPP2", 90, {}), ("DP2 TP2", 50, {}),
    ("TP2 PP2", 80, {"logits_budget_mib": 0}), ("CP2 TP2+SP", 80, {"logits_budget_mib": 0}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "max_tokens", "training"), full_but([("1 rank", 40, {}), ("CP2 TP2+SP", 4096, {})], [], SHARING)
)
def test_shared_prompts(shared: cases.Case, name: str, max_tokens: int, training: dict) -> None:
    """Groups of one, two and three, prompts of one token and more, whole and cut over small microbatches."""
    check(shared, LAYOUTS[name], max_tokens=max_tokens, share_prompts="always", **training)


MICROBATCHES = [("1 rank", 40), ("CP2", 64), ("PP2", 90), ("PP2 VPP2", 100), ("DP2", 50)]


@pytest.mark.parametrize(("name", "max_tokens"), full_but([("PP2 VPP2", 100)], [("CP2", 64)], MICROBATCHES))
def test_number_of_microbatches(tied: cases.Case, name: str, max_tokens: int) -> None:
    """Many small microbatches instead of one; under VPP their number is padded to a multiple of pp with empty ones."""
    check(tied, LAYOUTS[name], max_tokens=max_tokens)


@pytest.mark.slow
def test_more_data_parallel_ranks_than_sequences(tied: cases.Case) -> None:
    """A rank without a sequence computes a dummy token, joins every collective, and changes nothing."""
    batches = tuple(b.select([2], b.update) for b in tied.batches)
    steps = cases.reference_steps(tied.model, batches)
    for layout in ({}, {"dp": 2}, {"dp": 2, "cp": 2}):
        cfg = cases.run_config(tied.model, layout)
        ranks = run_world(cfg.parallel.world_size, cases.train_steps, cfg, batches)
        cases.compare(ranks, steps, partial(cases.reference_steps, tied.model, batches, torch.float32))


@pytest.mark.parametrize(
    ("form", "objective"), [("eq4", {"name": "tepo_eq4", "beta": cases.BETA}), ("alg1", {"name": "tepo_alg1"})]
)
@pytest.mark.full
def test_other_forms_of_tepo_train_to_the_reference(tmp_path: Path, form: str, objective: dict) -> None:
    case = cases.make_case(tmp_path, tied=True, form=form)
    check(case, LAYOUTS["CP2"], objective=objective)


@pytest.mark.slow
def test_fp32_runs_are_bit_identical(tied: cases.Case) -> None:
    import torch

    cfg = cases.run_config(tied.model, LAYOUTS["CP2 TP2"])
    first, second = (run_world(4, cases.train_steps, cfg, tied.batches) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for i in range(cases.STEPS):
            assert a[i]["loss"] == b[i]["loss"]
            assert all(torch.equal(a[i]["weights"][n], b[i]["weights"][n]) for n in a[i]["weights"])
