"""Passes that are not made: with one update on a rollout batch, and where the engine's log-probs are the old ones."""

import functools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.marks import full_but
from tests.parallel import cases
from tests.parallel import resume_worlds as w
from tests.worlds import run_world

LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2}]
ONE_UPDATE = {"epochs": 1, "minibatch_prompts": 4}


def with_and_without(rank: int, cfg: Any, batch: Any) -> list[dict[str, Any]]:
    """Take one update with the statistics of an old pass, and one without, from the same weights."""
    from tepo_megatron.actor.accumulator import mismatch
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate
    from tepo_megatron.losses import build_objective

    groups, out = parallel.initialize(cfg.parallel, activate("cpu"), 0), []
    for old_pass in (True, False):
        actor = Actor.open(cfg, groups)
        given = actor.attach_old_stats(batch) if old_pass else batch
        found = mismatch(given, actor.groups) if old_pass else None
        result = actor.update(given, build_objective(cfg.objective))
        weights = cases.owned_tensors(actor, [b.parameter for b in actor.bindings])
        out.append({"mismatch": found or result.mismatch, "result": result, "weights": weights})
    return out


@pytest.mark.parametrize("layout", full_but([{"tp": 2}], [{"cp": 2}], LAYOUTS), ids=str)
def test_a_single_update_needs_no_old_pass(case: cases.Case, layout: dict) -> None:
    """Loss, weights and mismatch are those with the pass, and the ratio is 1."""
    batch = replace(case.batches[0], old_logprobs_N=None, old_entropies_N=None, update=0)
    cfg = cases.run_config(case.model, layout, max_tokens=60)
    for with_pass, without in run_world(cfg.parallel.world_size, with_and_without, cfg, batch):
        assert without["result"].mismatch is not None and with_pass["result"].mismatch is None
        assert without["mismatch"] == pytest.approx(with_pass["mismatch"], rel=1e-5)
        assert (without["result"].ratio_B - 1).abs().max() <= 1e-6  # a mean of ones
        assert not without["result"].knows_entropy_change
        loss, expected = (x["result"].metrics["loss/total"][0] for x in (without, with_pass))
        assert loss == pytest.approx(expected, rel=1e-5)
        for name, weight in with_pass["weights"].items():
            assert cases.distance(without["weights"][name], weight) <= 1e-5, name


@pytest.mark.parametrize("layout", full_but([{}], [], [{}, {"tp": 2}]), ids=str)
def test_the_first_updates_ratio_is_one_in_bf16_too(case: cases.Case, layout: dict) -> None:
    """The old pass packs other sequences together, which moves log-probs in bf16: by more than GSPO's clip range."""
    batch = replace(case.batches[0], old_logprobs_N=None, old_entropies_N=None, update=0)
    cfg = cases.run_config(case.model, layout, max_tokens=60)
    cfg = replace(cfg, model=replace(cfg.model, precision="bf16"))
    for with_pass, without in run_world(cfg.parallel.world_size, with_and_without, cfg, batch):
        for made in (with_pass, without):
            assert (made["result"].ratio_B - 1).abs().max() <= 1e-6
        if with_pass["mismatch"] == without["mismatch"]:
            pytest.skip("the kernels of this CPU round alike however sequences are packed, so that any code passes")


class Count(w.Kill):
    """Report each call of any function in `where` (separated by spaces) to the journal, and kill nobody."""

    def __post_init__(self) -> None:
        for place in self.where.split():
            w.Kill(place)  # refuses a place that does not exist

    def arm(self, journal: Path) -> None:
        import importlib

        for place in self.where.split():
            module, _, path = place.partition(":")
            owner, name = path.split(".")
            self._note(getattr(importlib.import_module(module), owner), name, journal)

    @staticmethod
    def _note(owner: Any, name: str, journal: Path) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            with journal.open("a") as f:
                f.write(json.dumps({"called": name, "size": len(args[1])}) + "\n")
            return original(*args, **kwargs)

        setattr(owner, name, noted)


CALLS = Count("tepo_megatron.actor.pipeline:PipelineSchedule.forward tepo_megatron.actor.actor:Actor.update")


def run(model: Path, folder: Path, **sections: Any) -> tuple[list[dict[str, Any]], Counter]:
    """Return the records of a run, and the number of its passes without gradient and of its updates."""
    cfg = w.run_config(model, folder, **sections)
    w.attempt(cfg, folder / "journal", kill=CALLS)
    calls = Counter(row["called"] for row in w.journal_rows(folder / "journal") if "called" in row)
    return w.records(cfg.run_dir), calls


def updates_of(record: dict[str, Any], minibatch: int) -> int:
    """Return the number of updates of a step, from the groups that it kept."""
    return -(-int(record["rollout/kept_groups"]) // minibatch)


@pytest.mark.parametrize(
    ("sections", "passes"),
    [
        ({"training": ONE_UPDATE}, 0),
        ({"training": ONE_UPDATE, "objective": {"name": "clip_cov", "beta": None}}, w.STEPS),
        ({"training": ONE_UPDATE, "objective": {"ref_kl": {"beta": 0.1, "where": "reward"}}}, 2 * w.STEPS),
        # the gate's own: one where a step takes several updates
        ({"training": {"old_logprobs": "rollout"}, "objective": {"name": "grpo", "beta": None}}, None),
    ],
    ids=["one update", "weights from the minibatch", "KL in the reward", "of the engine"],
)
@pytest.mark.slow
def test_no_pass_is_wasted_and_the_engine_is_checked_all_the_same(
    model: Path, tmp_path: Path, sections: dict, passes: int | None
) -> None:
    records, calls = run(model, tmp_path, logging={"noise_floor_every": 0}, **sections)
    several = sum(updates_of(r, 2) > 1 for r in records)
    assert calls["forward"] == (several if passes is None else passes)
    records = [r for r in records if r["rollout/kept_groups"]]
    assert calls["update"] == sum(updates_of(r, 4 if sections["training"] is ONE_UPDATE else 2) for r in records)
    for record in records:
        assert record["rollout/logprob_diff_mean"] < 1e-5 and record["rollout/logprob_diff_max"] < 1e-4
        assert record["gate/logprob_diff_worst"] < 1e-5 and record["gate/compared_share"] == 1
        assert record["actor/entropy"] > 0 and record["tepo/kl_mask_share"] is None and record["tepo/dH_up_p50"] is None
    spread = [r["tepo/ratio_p99"] - r["tepo/ratio_p01"] for r in records]
    assert max(spread) <= 1e-5 if sections["training"] is ONE_UPDATE else max(spread) >= 1e-3
