"""A run goes on from a checkpoint: bit for bit on the same layout, and from the same state on any other."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tepo_megatron.base.types import TrainBatch
from tests.parallel import cases
from tests.parallel import checkpoint_worlds as w
from tests.parallel.test_families import EIGHT
from tests.tiny import tiny_model
from tests.worlds import run_world

pytestmark = pytest.mark.slow

FROM = {"tp": 2, "dp": 2}
# three layers, one of them dense, six experts: stages of unequal length, expert-parallel optimizers of their own
MOE_FROM = {"dp": 2, "ep": 2}
# bf16 weights next to decays in fp32, which have no masters
HYBRID_FROM = {"dp": 2, "tp": 2, "sequence_parallel": True}
RUNS = {"dense": ("fp32", FROM), "moe": ("fp32", MOE_FROM), "bf16": ("bf16", FROM), "hybrid": ("bf16", HYBRID_FROM)}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe") / "model"
    tiny_model(path, EIGHT["qwen3_moe"]())
    return path


def saving_run(rank: int, cfg: Any, batches: Any, folder: Path) -> dict[str, Any]:
    """Steps 1 to 3, saved after the first, with the writing held back until the third is over."""
    actor = cases.open_actor(cfg)
    go = w.hold_back_writing()
    with w.checkpoints(folder, actor) as checkpoints:
        w.update(actor, 1, batches[0])
        at_save, parts, random_at_save = w.raw_state(actor), w.parts(actor), w.generators()
        weights_at_save = cases.owned_tensors(actor, [b.parameter for b in actor.bindings])
        run_state = copy.deepcopy(w.RUN_STATE)
        checkpoints.save(1, actor, run_state)
        run_state["data"]["position"] = 0  # the run goes on, and the generators do, as the weights
        w.draw(3)
        loss = w.update(actor, 2, batches[1])
        weights = cases.owned_tensors(actor, [b.parameter for b in actor.bindings])
        w.update(actor, 3, batches[0])
        assert checkpoints.poll() is None and not list(folder.glob("step-????????")), "complete before anything was written"
        assert not psutil.Process().children(), "processes that could outlive the rank"
        go.set()
        saved = checkpoints.wait()
        assert checkpoints.poll() is None and checkpoints.wait() is None
    return {
        "at_save": at_save, "parts": parts, "random": random_at_save, "end": w.raw_state(actor), "loss": loss,
        "weights": weights, "saved": saved, "weights_at_save": weights_at_save,
    }  # fmt: skip


def resumed_run(rank: int, cfg: Any, batches: Any, folder: Path) -> dict[str, Any]:
    actor = cases.open_actor(cfg)
    w.draw(1 + rank)
    with w.checkpoints(folder, actor) as checkpoints, w.checkpoint_warnings() as warnings:
        found = checkpoints.newest()
        run_state = checkpoints.load(found, actor)
        out = {"found": found, "run": run_state, "loaded": w.raw_state(actor), "parts": w.parts(actor)}
        out |= {"random": w.generators(), "warnings": warnings}
        out["loss"] = w.update(actor, 2, batches[1])
        out["weights"] = cases.owned_tensors(actor, [b.parameter for b in actor.bindings])
        w.update(actor, 3, batches[0])
        return out | {"end": w.raw_state(actor)}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "model"
    tiny_model(path, EIGHT["qwen3_5"]())
    return path


def batches_of(case: cases.Case, precision: str) -> tuple[TrainBatch, ...]:
    """Return the batches; in bf16 such that no token has a KL, whose mask rounding could flip: the loss would jump."""
    if precision == "fp32":
        return case.batches
    return tuple(replace(b, old_entropies_N=torch.full_like(b.old_logprobs_N, -1.0)) for b in case.batches)


@dataclass(frozen=True)
class Saved:
    """The folder of a run's checkpoint, its model, and what its ranks held."""

    folder: Path
    model: Path
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def saved(case: cases.Case, moe: Path, hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict], Saved]:
    """A run in this precision on this layout, made when it is first asked for."""
    runs: dict[str, Saved] = {}

    def made(precision: str, layout: dict) -> Saved:
        key = f"{precision} {layout}"
        if key not in runs:
            folder = tmp_path_factory.mktemp("saved")
            model = moe if layout is MOE_FROM else hybrid if layout is HYBRID_FROM else case.model
            cfg = w.run_config(model, layout, precision)
            ranks = run_world(cfg.parallel.world_size, saving_run, cfg, batches_of(case, precision), folder)
            runs[key] = Saved(folder, model, ranks)
        return runs[key]

    return made


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("fp32", MOE_FROM),
        ("bf16", HYBRID_FROM),
        pytest.param("bf16", FROM, marks=pytest.mark.full),
        pytest.param("fp32", FROM, marks=pytest.mark.full),
        pytest.param("fp32", {}, marks=pytest.mark.full),
        pytest.param("fp32", {"pp": 2, "vpp": 2}, marks=pytest.mark.full),
        pytest.param("bf16", {"cp": 2, "tp": 2, "sequence_parallel": True}, marks=pytest.mark.full),
        pytest.param("bf16", MOE_FROM, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_on_the_same_layout_it_goes_on_bit_for_bit(
    case: cases.Case, saved: Callable[[str, dict], Saved], layout: dict, precision: str
) -> None:
    """The state is that of the moment of save(), though two updates come before the first byte is written."""
    run = saved(precision, layout)
    before, cfg = run.ranks, w.run_config(run.model, layout, precision)
    after = run_world(cfg.parallel.world_size, resumed_run, cfg, batches_of(case, precision), run.folder)
    for a, b in zip(before, after, strict=True):
        assert not w.same(a["at_save"], a["end"])
        assert w.same(b["loaded"], a["at_save"])
        assert w.same(b["end"], a["end"])
        assert a["random"] == b["random"] and not b["warnings"]
        assert b["run"] == w.RUN_STATE and b["found"].step == 1 == a["saved"].step
    assert sorted(p.name for p in run.folder.iterdir()) == ["step-00000001"]


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        pytest.param("dense", {}, marks=pytest.mark.full),
        ("dense", {"tp": 2, "pp": 2}),
        pytest.param("bf16", {"pp": 2}, marks=pytest.mark.full),
        ("moe", {"pp": 2}),
        ("hybrid", {"cp": 2, "pp": 2}),
        pytest.param("hybrid", {}, marks=pytest.mark.full),
        pytest.param("hybrid", {"pp": 2, "vpp": 2}, marks=pytest.mark.full),
        pytest.param("dense", {"pp": 2}, marks=pytest.mark.full),
        pytest.param("dense", {"cp": 2}, marks=pytest.mark.full),
        pytest.param("moe", {}, marks=pytest.mark.full),
        pytest.param("dense", {"pp": 2, "vpp": 2}, marks=pytest.mark.full),
        pytest.param("moe", {"tp": 2, "pp": 2, "sequence_parallel": True}, marks=pytest.mark.full),
        pytest.param("moe", {"dp": 2, "cp": 2, "ep": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_on_another_layout_it_goes_on_from_the_same_state(
    case: cases.Case, saved: Callable[[str, dict], Saved], run: str, layout: dict
) -> None:
    """Every weight, master and moment is bit for bit what it was; what follows is the same up to the order of sums."""
    precision, made_on = RUNS[run]
    first = saved(precision, made_on)
    before, cfg = first.ranks, w.run_config(first.model, layout, precision)
    batches = batches_of(case, precision)
    after = run_world(cfg.parallel.world_size, resumed_run, cfg, batches, first.folder)
    expected, loaded = (w.whole([r["parts"] for r in ranks], cases.VOCAB) for ranks in (before, after))
    assert loaded.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(expected[n], loaded[n])] == []
    prefixes = {n.rpartition("state.")[2].split(".")[0] for n in expected if n.startswith("optimizer.")}
    assert prefixes == {"exp_avg", "exp_avg_sq"} | ({"param"} if precision == "bf16" else set())
    if run == "hybrid":
        decays = [n for n in expected if n.endswith("A_log") and not n.startswith("optimizer.")]
        assert len(decays) == 3 and all(expected[n].dtype == torch.float32 for n in decays)
    assert any("random generators start from the seed" in line for line in after[0]["warnings"])

    tolerance = 1e-6 if precision == "fp32" else 2**-7  # in bf16 each weight may be rounded to a neighbour
    weights, reference = ({n: t for r in ranks for n, t in r["weights"].items()} for ranks in (after, before))
    common = weights.keys() & reference.keys()  # a rank returns its own experts only
    assert len(common) >= len(case.batches) and (run == "moe" or weights.keys() == reference.keys())
    assert max(cases.distance(weights[n], reference[n]) for n in common) <= tolerance
    if precision == "fp32":
        # A mean of terms of either sign and a size of about one, which leave 0.05: twenty times their relative rounding.
        of_loss = 2e-5 * abs(before[0]["loss"])
    else:  # each of the two losses is off
        loaded_weights = {n: t for r in before for n, t in r["weights_at_save"].items()}
        of_loss = 2 * cases.bf16_error_of_loss(first.model, loaded_weights, batches[1])
    assert abs(after[0]["loss"] - before[0]["loss"]) <= of_loss
