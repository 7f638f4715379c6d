"""New weights over gloo from two pipeline stages to a real server of each engine, and to one that loses the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import cases
from tests.server.served import MAX_LOGPROB_DIFF, SAMPLING, call, logprob_diff, make_prompts, serve, server_processes
from tests.tiny import tiny_qwen3
from tests.worlds import run_world

pytestmark = [pytest.mark.server, pytest.mark.full]
SECONDS = 30.0


def sync_of(cfg: Any, receiver: Any) -> Any:
    from tepo_megatron import parallel
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.platform import activate
    from tepo_megatron.weights.broadcast import BroadcastSync

    groups = parallel.initialize(cfg.parallel, activate("cpu"), 0)
    actor = Actor(cfg, groups)
    return actor, BroadcastSync(cfg.sync, actor.bindings, actor.arch, groups, receiver)


def scale(actor: Any, factor: float) -> None:
    for binding in actor.bindings:
        binding.parameter.data.mul_(factor)


def config_of(model: Path) -> Any:
    cfg = cases.run_config(model, {"pp": 2})
    return replace(cfg, sync=replace(cfg.sync, transport="group", bucket_mib=1, timeout_seconds=SECONDS, verify_every=2))


def push_and_compare(rank: int, cfg: Any, folder: Path, name: str, tp: int) -> list[float]:
    """Largest log-prob differences: after a push of other weights, and after one of these, changed; each to both."""
    if rank > 0:
        actor, sync = sync_of(cfg, None)
        with sync:
            sync.push(1)
            scale(actor, 1.25)
            sync.push(2)
        return []
    prompts, temperature = make_prompts(8, seed=9), SAMPLING.temperature
    (folder / "served").mkdir()
    with serve(name, folder / "served", tp=tp) as served:
        served.engine.generate(prompts, SAMPLING, seed=0)  # leaves the prompts in the prefix cache
        actor, sync = sync_of(cfg, served.engine)
        new = tiny_qwen3(folder / "again", tied=True, seed=100)
        diffs = []
        with sync:
            for version in (1, 2):
                sync.push(version)
                rollouts = served.engine.generate(prompts, SAMPLING, seed=0)
                assert {r.policy_version for r in rollouts} == {version}
                diffs += [logprob_diff(model, rollouts, temperature) for model in (new, served.model)]
                scale(actor, 1.25)
                served.model = new
                new = tiny_qwen3(folder / f"after-{version}", tied=True, seed=100)
                for parameter in new.parameters():
                    parameter.data.mul_(1.25)
            assert sync.rounds > 2 and sync._meetings == 1
        about = {"vllm": "/weight_info", "sglang": "/model_info"}[name]
        assert call(served, "GET", about)["weight_version"] == "2"
        assert len(server_processes(served.engine)) > tp
        return diffs


@pytest.mark.parametrize(("name", "tp"), [("vllm", 1), ("sglang", 1), ("vllm", 2), ("sglang", 2)])
def test_an_update_replaces_all_weights(name: str, tp: int, tmp_path: Path) -> None:
    tiny_qwen3(tmp_path / "new", tied=True, seed=100)
    diffs = run_world(2, push_and_compare, config_of(tmp_path / "new"), tmp_path, name, tp, timeout=400)[0]
    print(f"largest log-prob differences to the new weights and to the old, in two updates: {diffs}")
    assert diffs[0] <= MAX_LOGPROB_DIFF and diffs[2] <= MAX_LOGPROB_DIFF
    assert diffs[1] > 0.1 and diffs[3] > 0.1
