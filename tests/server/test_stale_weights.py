"""The gate with real servers of both engines: one of two drops an update, or one tensor of it, and says nothing.

The servers are started once and serve one run after the other, at their URLs. Trainer, delivery and gate are the product's; the
fault is planted in the server's process by `planted/sitecustomize.py`.
"""

import asyncio
import contextlib
import io
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tepo_megatron import report
from tepo_megatron.base.processes import quiet_upstream
from tepo_megatron.config import Config, ServerConfig
from tepo_megatron.engines.engines import ENGINES, launch_of
from tepo_megatron.engines.servers.server import LocalServer
from tepo_megatron.monitor import run_dir
from tepo_megatron.rollout import record
from tepo_megatron.trainer.gate import pieces
from tests.harness.stale_weights import FUNCTION
from tests.parallel import resume_worlds as w
from tests.server.planted.sitecustomize import CONTROL
from tests.services import train_here
from tests.worlds import run_world

pytestmark = [pytest.mark.server, pytest.mark.full]
PLANTED = Path(__file__).parent / "planted"
KEY = secrets.token_hex(32)
FAULTY = "inference server 1"
FIRST = 2  # the first version with the fault; the update before it, which changed every weight, is served correctly
LIMIT, NOISE = 1e-3, 1e-4  # nats
SCORE = """
import zlib

def score(prompt, response, answer):
    return float(zlib.crc32(response.encode()) % 2)
"""
CONTINUE = {"max_staleness": 3, "on_weight_update": "continue", "oversample": 1.5}
# name -> (what is planted, sections of the config)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "shm": ("dropped", {}),
    "group": ("dropped", {"sync": {"transport": "group"}}),
    "shm, ahead, one tensor": ("one tensor", {"rollout": {"max_staleness": 1}}),
    "group, 3 ahead, continue, one tensor": ("one tensor", {"rollout": CONTINUE, "sync": {"transport": "group"}}),
    "delta, one tensor": ("one tensor", {"sync": {"delta": True}}),
    "ipc, function": ("dropped", {"rollout": {"function": FUNCTION}, "sync": {"transport": "ipc"}}),
}


@dataclass
class Servers:
    """Two servers, the second with the fault that `control` names."""

    model: Path
    score: Path
    urls: list[str]
    engine: str
    control: Path

    def config(self, folder: Path, sections: dict[str, Any]) -> Config:
        common: dict[str, dict[str, Any]] = {
            "rollout": {
                "engine": self.engine, "servers": len(self.urls),
                "server": {"urls": self.urls},
                "samples_per_prompt": 4, "record": True, "filter_uniform_groups": False, "max_generation_rounds": 1,
            },
            "reward": {"terms": [{"type": "custom", "function": f"{self.score}:score"}], "workers": 1, "timeout_seconds": 30.0},
            "training": {"steps": 7},
            "optimizer": {"lr": 1e-3, "warmup_steps": 0},
            "evaluation": {"every": 0},
            "data": {"eval": None},
            "logging": {"noise_floor_every": 0},
            "sync": {"max_logprob_diff": LIMIT},
        }  # fmt: skip
        merged = {name: section | sections.get(name, {}) for name, section in common.items()}
        return w.run_config(self.model, folder, export_hf=False, **merged)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp(request.param)
    score = folder / "score.py"
    score.write_text(SCORE)
    made = Servers(w.write_inputs(folder / "model"), score, ["http://127.0.0.1:1"] * 1, request.param, folder / "fault.json")
    run = made.config(folder, {})
    launch = launch_of(run.model, run.rollout, run.sync, platform=run.platform, max_model_len=run.served_tokens, seed=run.seed)
    cfg = ServerConfig(kv_cache_gib=0.25)
    path = [str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    faulty = {CONTROL: str(made.control), "PYTHONPATH": os.pathsep.join(path)}
    started = [LocalServer(f"server {i}", ENGINES[request.param](), cfg, launch, folder / f"{i}.log", KEY) for i in (0, 1)]
    with contextlib.ExitStack() as stack:
        for server, more in zip(started, ({}, faulty), strict=True):
            stack.callback(server.forget)
            stack.callback(server.stop)
            with mock.patch.dict(os.environ, more):
                server.launch()
        made.urls = [asyncio.run(server.wait_ready()).url for server in started]
        yield made


def run(rank: int, cfg: Config) -> None:
    quiet_upstream()
    report.write_report = lambda folder: folder / "report.png"
    with contextlib.redirect_stdout(io.StringIO()):
        train_here(cfg)


def first_possible(cfg: Config) -> int:
    """The first step with tokens that the faulty server sampled when it should have had a version that it was not given."""
    folder = cfg.run_dir / record.FOLDER
    for step in record.steps(folder):
        for rollout in record.read(folder, step)[0]:
            if any(server.startswith(FAULTY) and version >= FIRST for _, (version, server) in pieces(rollout)):
                return step
    raise AssertionError("the faulty server sampled nothing of these versions")


@pytest.mark.parametrize("name", RUNS)
def test_a_server_that_drops_an_update_ends_the_run_in_the_first_possible_step(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kind, sections = RUNS[name]
    monkeypatch.setenv("TEPO_SERVER_KEY", KEY)
    servers.control.write_text(json.dumps({"run": str(tmp_path), "kind": kind, "first": FIRST}))
    cfg = servers.config(tmp_path, sections)
    run_dir.prepare(cfg)
    with pytest.raises(AssertionError) as ended:
        run_world(1, run, cfg, timeout=120.0)
    said = str(ended.value).strip().splitlines()[-1]
    assert "SyncError: mean |rollout - actor| log-prob difference is" in said, said
    assert f"{FAULTY} ({servers.urls[1]}) does not serve the weights that were sent" in said
    records = [json.loads(line) for line in (cfg.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(records) + 1 == first_possible(cfg)
    assert all(r["gate/logprob_diff_worst"] < NOISE and r["gate/compared_share"] == 1 for r in records)
    assert any(r["actor/grad_norm"] for r in records[:FIRST]), "no weights changed"
