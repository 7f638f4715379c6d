"""Canaries with real servers of both engines: one of two has other weights than it says, and says nothing.

The trainer's side is transformers in fp64; the last test is a whole run. Faults are planted in the server's process by
`planted/sitecustomize.py`, and in the prefix cache by leaving out the request that empties it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tepo_megatron import report
from tepo_megatron.config import Config, RolloutConfig, ServerConfig, SyncConfig
from tepo_megatron.controller.canaries import make_canaries
from tepo_megatron.errors import SyncError
from tepo_megatron.inference.engine_api import LaunchSpec
from tepo_megatron.inference.engines import ENGINES
from tepo_megatron.inference.linear_attention import layers_of
from tepo_megatron.inference.servers.endpoint import Endpoint
from tepo_megatron.inference.servers.fleet import Fleet
from tepo_megatron.inference.servers.local import LocalServer
from tepo_megatron.limits import CANARY_MARGIN
from tepo_megatron.observability import run_dir
from tepo_megatron.platform import activate
from tepo_megatron.train import train
from tepo_megatron.types import Canaries
from tepo_megatron.utils.quiet import quiet_upstream
from tests.parallel import resume_worlds as w
from tests.server.hybrids import tiny_hybrid
from tests.server.planted.sitecustomize import CONTROL
from tests.server.served import MAX_MODEL_LEN, WORLD_SECONDS, save_weights
from tests.tiny import VOCAB_SIZE, tiny_qwen3
from tests.worlds import run_world

pytestmark = [pytest.mark.server, pytest.mark.full]
PLANTED = Path(__file__).parent / "planted"
NOISE = 1e-5  # nats
HYBRID_NOISE = 5e-5  # transformers computes the gated delta rule in fp32 whatever the model's type is
CANARIES = make_canaries(8, MAX_MODEL_LEN - CANARY_MARGIN, VOCAB_SIZE, seed=0)


class FaultyServer(LocalServer):
    """A server in whose process the fault of a control file is planted, at each of its starts."""

    control: Path

    def launch(self) -> None:
        path = [str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]
        with mock.patch.dict(os.environ, {CONTROL: str(self.control), "PYTHONPATH": os.pathsep.join(path)}):
            super().launch()


@dataclass
class Trainer:
    """The side of the trainer: a model whose weights change, and the fleet that gets them."""

    fleet: Fleet
    model: Any
    folder: Path
    version: int = -1

    def change(self, size: float) -> None:
        """Add noise of this share of each weight's mean size, and announce the scores of the next version."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(size * weight.abs().mean() * torch.randn(weight.shape, generator=generator))
        self.fleet.expect_scores(self.version, scores(self.model, CANARIES))

    def deliver(self) -> None:
        """Send the weights to the servers that lack them."""
        self.fleet.update_weights(save_weights(self.model, self.folder, files=1), self.version)

    def plant(self, kind: str) -> None:
        """Make further updates of the last server faulty. "": they are not."""
        FaultyServer.control.write_text(json.dumps({"run": "run", "kind": kind, "first": 0}))

    def deliver_again(self) -> None:
        """Wait for the restarted server, and send it the weights."""
        until(lambda: self.fleet.needs_weights)
        self.deliver()


@torch.no_grad()
def scores(model: Any, canaries: Canaries) -> list[float]:
    """Return the canaries' log-probs under the model in fp64."""
    exact, found = model.double(), []
    for ids in canaries.sequences:
        logits = exact(torch.tensor([ids])).logits[0, :-1]
        found += logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    model.float()
    return found


def until(condition: Any, seconds: float = ServerConfig().ready_seconds) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@contextlib.contextmanager
def trainer(
    engine: str,
    folder: Path,
    fault: dict[str, Any],
    servers: int = 2,
    tp: int = 1,
    make: Callable[[Path], Any] = tiny_qwen3,
    **sync: Any,
) -> Iterator[Trainer]:
    """Yield a trainer with ready servers, the last with the fault, that serve version 0.

    Args:
        engine: vllm or sglang.
        folder: Folder of model, logs and control file.
        fault: The control file; see `planted/sitecustomize.py`.
        servers: Number of servers.
        tp: Tensor-parallel size of each.
        make: Writes the model.
        sync: Keys of SyncConfig.
    """
    model = make(folder / "model")
    FaultyServer.control = folder / "control.json"
    FaultyServer.control.write_text(json.dumps({"run": "run"} | fault))
    more = ["--block-size", "32"] if engine == "vllm" else []  # so that prefixes of canaries are cached
    server = ServerConfig(kv_cache_gib=0.25, restarts=9, tp=tp, extra_args=more)
    cfg = RolloutConfig(engine=engine, servers=servers, server=server)
    kinds = layers_of(folder / "model")
    launch = LaunchSpec(folder / "model", MAX_MODEL_LEN, seed=0, platform="cpu", precision="fp32", **kinds)
    endpoints = []
    for i in range(servers):
        api, kind = ENGINES[engine](), FaultyServer if i == servers - 1 else LocalServer
        made = kind(f"server {i}", api, server, launch, folder / f"{i}.log")
        endpoints.append(Endpoint(made, api, server, MAX_MODEL_LEN))
    with Fleet(endpoints, cfg) as fleet:
        fleet.start()
        fleet.wait_ready()
        fleet.use_canaries(CANARIES, SyncConfig(canaries=8, **sync), same_precision=True)
        found = Trainer(fleet, model, folder)
        found.change(0.0)
        found.deliver()
        yield found


@pytest.mark.parametrize("engine", ["vllm", "sglang", pytest.param("torch", marks=pytest.mark.full)])
def test_healthy_servers_answer_as_the_model_in_fp64_at_every_version(engine: str, tmp_path: Path) -> None:
    with trainer(engine, tmp_path, {"kind": "", "first": 0}, canary_every=0.2) as it:
        for size in (1e-6, 1e-4, 1e-2, 0.0, 1e-5):
            it.change(size)
            it.deliver()
            time.sleep(0.5)
        metrics = it.fleet.canary_metrics()
        assert metrics["canary/checks"] > 12 and metrics["canary/wrong"] == 0, "questions between the updates came, too"
        assert 0 < metrics["canary/diff_worst"] < NOISE
        assert it.fleet.take_events() == [] and it.fleet.restarts == 0


@pytest.mark.parametrize(
    ("engine", "make", "noise"),
    [("vllm", tiny_qwen3, NOISE), ("sglang", tiny_qwen3, NOISE), ("vllm", tiny_hybrid, HYBRID_NOISE)],
    ids=["vllm", "sglang", "vllm hybrid"],
)
def test_each_fault_is_found_at_the_update_named_and_gone_after_a_restart(
    engine: str, make: Callable[[Path], Any], noise: float, tmp_path: Path
) -> None:
    with trainer(engine, tmp_path, {"kind": "", "first": 0}, make=make) as it:
        for kind, size in (("dropped", 1e-5), ("one tensor", 1e-3), ("one layer", 1e-3), ("scaled", 1e-3)):
            it.change(size)
            it.plant(kind)
            it.deliver()
            it.plant("")
            it.deliver_again()
            whole = f"it serves the weights of version {it.version - 1} instead of {it.version}"
            part = f"it serves weights that are neither those of version {it.version} nor of another known version"
            said = "\n".join(it.fleet.take_events())
            assert f"canaries of server 1: {whole if kind == 'dropped' else part}" in said and "server 0" not in said
            metrics = it.fleet.canary_metrics()
            assert metrics["canary/wrong"] == 1 and 0 < metrics["canary/diff_worst"] < noise
        assert it.fleet.restarts == 4 and not it.fleet.needs_weights


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_one_stale_shard_is_found(engine: str, tmp_path: Path) -> None:
    with trainer(engine, tmp_path, {"kind": "one shard", "first": 1}, servers=1, tp=2) as it:
        it.change(1e-3)
        it.deliver()
        it.deliver_again()
        assert "canaries of server 0: it serves weights that are neither" in "\n".join(it.fleet.take_events())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_that_drops_every_update_ends_the_run(engine: str, tmp_path: Path) -> None:
    with trainer(engine, tmp_path, {"kind": "dropped", "first": 0}) as it:
        it.change(1e-3)
        it.deliver()
        with pytest.raises(SyncError, match=r"server 1: it serves the weights of version 0 .* It was wrong before") as ended:
            it.deliver_again()
        print(ended.value)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_prefix_cache_that_is_not_emptied_is_found(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(engine, tmp_path, {"kind": "", "first": 0}, servers=1) as it:
        finish = type(it.fleet.endpoints[0].api).finish_update

        async def keeps_cache(self: Any, send: Any, version: int) -> None:
            async def some(method: str, path: str, body: Any) -> Any:
                if path.startswith(("/reset_prefix_cache", "/flush_cache")):
                    return {"success": True}
                return await send(method, path, body)

            await finish(self, some, version)

        with monkeypatch.context() as patch:
            patch.setattr(type(it.fleet.endpoints[0].api), "finish_update", keeps_cache)
            it.change(1e-3)
            it.deliver()
        it.deliver_again()
        said = "\n".join(it.fleet.take_events())
        assert "it serves the weights of version 1, but its prefix cache holds what other weights computed" in said


def run(rank: int, cfg: Config) -> None:
    quiet_upstream()
    report.write_report = lambda folder: folder / "report.png"
    with contextlib.redirect_stdout(io.StringIO()):
        train(cfg, activate("cpu"))


@pytest.mark.parametrize(
    ("engine", "sections"),
    [("vllm", {}), ("sglang", {"rollout": {"max_staleness": 1}}), ("vllm", {"rollout": {"colocate": True}})],
    ids=str,
)
def test_a_run_goes_on_after_a_dropped_update(
    engine: str, sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = w.write_inputs(tmp_path / "model")
    score = tmp_path / "score.py"
    score.write_text(
        "import zlib\n\ndef score(prompt, response, answer):\n    return float(zlib.crc32(response.encode()) % 2)\n"
    )
    control = tmp_path / "control.json"
    control.write_text(json.dumps({"run": "run", "kind": "dropped", "first": 2, "last": 2}))
    monkeypatch.setenv(CONTROL, str(control))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]))
    common: dict[str, dict[str, Any]] = {
        "rollout": {
            "engine": engine, "server": {"kv_cache_gib": 0.25}, "samples_per_prompt": 4,
            "filter_uniform_groups": False, "max_generation_rounds": 1,
        },
        "reward": {"terms": [{"type": "custom", "function": f"{score}:score"}], "workers": 1, "timeout_seconds": 30.0},
        "optimizer": {"lr": 1e-3, "warmup_steps": 0},
        "evaluation": {"every": 0},
        "data": {"eval": None},
        "logging": {"noise_floor_every": 0},
        "sync": {"canaries": 4, "max_logprob_diff": 1e-3},
    }  # fmt: skip
    cfg = w.run_config(model, tmp_path, export_hf=False, **{k: v | sections.get(k, {}) for k, v in common.items()})
    run_dir.prepare(cfg)
    run_world(1, run, replace(cfg, export_hf=False), timeout=WORLD_SECONDS)
    records = [json.loads(line) for line in (cfg.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == cfg.training.steps
    # the third update of each start is dropped: version 2, and version 4 by the restarted server
    assert sum(r["canary/wrong"] or 0 for r in records) in (1, 2) and sum(r["rollout/server_restarts"] for r in records) >= 1
    assert all(r["gate/logprob_diff_worst"] < NOISE for r in records if r["gate/logprob_diff_worst"] is not None)
    log = (cfg.run_dir / "log.txt").read_text()
    assert "it serves the weights of version 1 instead of 2" in log and "is started again" in log
