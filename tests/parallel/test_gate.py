"""The stale-weights gate: real actor, loop and delivery; what is wrong is planted in the engine, or in its log-probs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.base.errors import SyncError
from tepo_megatron.base.types import Rollout, TrainBatch
from tests.harness import stale_weights as harness
from tests.harness.faulty_engine import FAULTS
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel import resume_worlds as w
from tests.parallel.cases import open_actor
from tests.worlds import run_world

LIMIT = 1e-3
EVERY_MODE = [(mode, False) for mode in harness.TURNS] + [(mode, True) for mode in harness.MODES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "one_server"), full_but([("sync, old_logprobs rollout", True)], [("3 ahead, continue", True)], EVERY_MODE)
)
def test_an_engine_that_ignores_updates_is_stopped_in_the_first_possible_step(
    model: Path, tmp_path: Path, mode: str, one_server: bool
) -> None:
    # three steps ahead only the last two of five steps may be of new weights, of which the one server may sample nothing
    steps = 10 if "3 ahead" in mode else w.STEPS
    verdict = harness.run(harness.Trial(mode, "ignores every update", one_server, steps=steps), model, tmp_path)
    assert verdict.first is not None and verdict.stopped == verdict.first


@pytest.mark.slow
@pytest.mark.parametrize("fault", full_but(["every other tensor old"], [], [f for f in FAULTS if "ignores" not in f]))
def test_weights_that_are_wrong_in_part_are_stopped_too(model: Path, tmp_path: Path, fault: str) -> None:
    verdict = harness.run(harness.Trial("ahead", fault, one_server=True), model, tmp_path)
    assert verdict.stopped == verdict.first == 3  # the first rollouts of version 1


@pytest.mark.full
@pytest.mark.parametrize("mode", ["experts", "experts replayed"])
def test_a_stale_router_is_seen_though_the_actor_takes_its_choice_over(model: Path, tmp_path: Path, mode: str) -> None:
    verdict = harness.run(harness.Trial(mode, "one router stale", one_server=True), model, tmp_path)
    assert verdict.stopped == verdict.first == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", full_but(["3 ahead, continue"], [], harness.MODES))
def test_a_healthy_run_compares_every_token_and_goes_on(model: Path, tmp_path: Path, mode: str) -> None:
    trial = harness.Trial(mode, "none", one_server=True)
    verdict = harness.run(trial, model, tmp_path)
    cfg = harness.config(trial, model, tmp_path)
    assert verdict.stopped is None and verdict.worst_healthy is not None and verdict.worst_healthy < harness.noise(cfg) * 3
    assert all(r["gate/compared_share"] == 1 for r in w.records(cfg.run_dir))


def sampled(logprobs_N: torch.Tensor, batch: TrainBatch, version: int, servers: int) -> tuple[Rollout, ...]:
    """The sequences as `servers` servers sampled them in turn, with these log-probs."""
    found = []
    for i, (rollout, own) in enumerate(zip(batch.rollouts, logprobs_N.split(batch.response_lengths), strict=True)):
        logprobs_L = torch.zeros(rollout.token_ids_L.numel())
        logprobs_L[rollout.response_mask_L] = own
        name = ((0, f"server {i % servers}"),)
        found.append(replace(rollout, rollout_logprobs_L=logprobs_L, policy_version=version, servers=name))
    return tuple(found)


def verdicts(rank: int, cfg: Any, batch: TrainBatch) -> dict[str, Any]:
    """Return the gate's verdicts on rollouts of version 0, by four servers, when the actor has version 1."""
    from tepo_megatron.losses import build_objective
    from tepo_megatron.trainer.gate import WeightsGate

    actor = open_actor(cfg)
    gate = WeightsGate(cfg.rollout, cfg.training, cfg.sync, actor, actor.groups)
    of_few_tokens = WeightsGate(cfg.rollout, cfg.training, replace(cfg.sync, compared_tokens=1), actor, actor.groups)

    def logprobs() -> torch.Tensor:
        actor.finish_step()
        return actor.groups.broadcast_from_last_stage(actor.logprobs(batch).clone()).cpu()

    for each in (gate, of_few_tokens):
        each.delivered(0)
    of_0 = logprobs()
    actor.start_step(1)
    actor.update(batch, build_objective(cfg.objective))
    of_1 = logprobs()
    for each in (gate, of_few_tokens):
        each.delivered(1)
    weights = [b.parameter.detach().clone() for b in actor.bindings]

    def judge(rollouts: tuple[Rollout, ...], gate: WeightsGate = gate) -> Any:
        gate.start_step(2)
        try:
            gate.before_updates(replace(batch, rollouts=rollouts), step=2)
        except SyncError as e:
            return str(e)
        return gate.values()

    right = sampled(of_0, batch, 0, 4)
    wrong = [r if i % 4 != 2 else replace(r, rollout_logprobs_L=r.rollout_logprobs_L - 3 * LIMIT * r.response_mask_L)
             for i, r in enumerate(right)]  # fmt: skip
    of_both = [
        replace(new, rollout_logprobs_L=torch.cat((old.rollout_logprobs_L[:-1], new.rollout_logprobs_L[-1:])), policy_version=0,
                later_versions=((new.token_ids_L.numel() - 1, 1),)) if new.response_length > 1 else old
        for old, new in zip(right, sampled(of_1, batch, 1, 4), strict=True)
    ]  # fmt: skip
    out = {
        "distance": float((of_0 - of_1).abs().mean()),
        "right": judge(right),
        "one server": judge(tuple(wrong)),
        "stale": judge(sampled(of_1, batch, 0, 1)),
        "some": judge(right, of_few_tokens),
        "unknown": judge(sampled(of_0, batch, -1, 1)),
        "both": judge(tuple(of_both)),
    }
    gate.with_old_stats(replace(batch, rollouts=tuple(of_both), old_logprobs_N=of_1.to(actor.groups.device)), step=2)
    out["both, in the end"] = gate.values()
    out["same"] = all(torch.equal(a, b.parameter) for a, b in zip(weights, actor.bindings, strict=True))
    return out


@pytest.mark.parametrize(
    "layout", full_but([{}, {"pp": 2}], [{"cp": 2}], [{}, {"pp": 2}, {"tp": 2}, {"cp": 2}, {"dp": 2}]), ids=str
)
def test_each_server_is_compared_with_the_version_that_it_says(case: cases.Case, layout: dict) -> None:
    batch = replace(case.batches[0], old_logprobs_N=None, old_entropies_N=None, update=0)
    cfg = cases.run_config(case.model, layout, max_tokens=60)
    cfg = replace(cfg, rollout=replace(cfg.rollout, max_staleness=1), sync=replace(cfg.sync, max_logprob_diff=LIMIT))
    for said in run_world(cfg.parallel.world_size, verdicts, cfg, batch):
        assert said["distance"] > 10 * LIMIT and said["same"], "the actor has its own weights again"
        assert said["right"]["gate/logprob_diff_worst"] < 1e-5 and said["right"]["gate/compared_share"] == 1
        # three quarters of the limit over all, which alone would pass
        assert "tokens of server 2, above sync.max_logprob_diff=0.001: server 2 does not serve" in said["one server"]
        assert "at version 0" in said["stale"] and "above sync.max_logprob_diff" in said["stale"]
        assert said["some"]["gate/compared_share"] < 1
        assert "sampled with version -1 of the weights, which this run did not deliver (it keeps 0, 1)" in said["unknown"]
        assert 0.5 < said["both"]["gate/compared_share"] < 1
        assert (
            said["both, in the end"]["gate/compared_share"] == 1 and said["both, in the end"]["gate/logprob_diff_worst"] < 1e-5
        )
