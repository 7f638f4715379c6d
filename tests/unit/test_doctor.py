"""`tepo doctor`, without its step (tests/e2e/test_doctor.py takes one): what is wrong is named, with its mend."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.cli import preflight
from tepo_megatron.config import Config
from tepo_megatron.config_io import validate
from tepo_megatron.doctor import examine, machine, trial
from tepo_megatron.doctor.findings import Finding
from tests.tiny import tiny_qwen3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3(path, layers=2)
    rows = [{"prompt": f"1+{i}?\n", "answer": str(1 + i)} for i in range(40)]
    (path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


Make = Callable[..., Config]


@pytest.fixture
def made(model: Path, tmp_path: Path) -> Make:
    def make(**sections: Any) -> Config:
        tree: dict[str, Any] = {
            "name": "run", "output": str(tmp_path / "runs"), "platform": "cpu",
            "model": {"path": str(model), "precision": "fp32"},
            "data": {"train": str(model / "train.jsonl"), "max_prompt_tokens": 16},
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": 2, "max_response_tokens": 16},
            "training": {"minibatch_prompts": 4, "max_tokens_per_microbatch": 64},
        }  # fmt: skip
        return validate({**tree, **{k: {**tree.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}})

    return make


def findings(cfg: Config) -> dict[str, Finding]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is started")

    return {finding.check: finding for finding in examine(cfg, preflight, refuse, refuse, quick=True)}


def test_a_sound_run_passes(made: Make) -> None:
    found = findings(made())
    assert {f.verdict for name, f in found.items() if name not in ("a step", "memory")} == {"pass"}, found
    assert found.keys() >= {
        "packages",
        "config",
        "cores",
        "memory",
        "shared memory",
        "disk",
        "disk speed",
        "data",
        "grading",
    }
    assert "Adam: this package" in found["kernels"].said
    assert "40 prompts" in found["data"].said and "40 right answers" in found["grading"].said
    assert found["a step"].verdict == "skip" and "--quick" in found["a step"].said


def test_what_is_refused_is_a_finding_and_the_rest_is_looked_at(made: Make, model: Path, tmp_path: Path) -> None:
    found = findings(made(parallel={"tp": 3}))
    assert found["config"].verdict == "fail" and "parallel.tp=3" in found["config"].said and "data" in found

    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1?"}\n')
    found = findings(made(data={"train": str(tmp_path / "bad.jsonl")}))
    assert found["data"].verdict == "fail" and "bad.jsonl:1" in found["data"].said and "disk" in found

    found = findings(made(rollout={"prompts_per_step": 64}))
    assert found["prompts"].verdict == "fail" and "rollout.prompts_per_step=64" in found["prompts"].said


def test_right_answers_that_are_not_found_right_are_shown(made: Make, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": "{7" if i == 3 else str(i)} for i in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    grading = findings(made(data={"train": str(tmp_path / "train.jsonl")}))["grading"]
    assert grading.verdict == "warn" and "1 of 16 right answers" in grading.said and "'{7' (no_box)" in grading.said


def test_a_full_disk_a_busy_port_and_another_package(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = machine.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(
        machine.importlib.metadata, "requires", lambda _: ["torch>=99", "no-such-package", "vllm; extra == 'cpu'"]
    )
    with socket.create_server(("127.0.0.1", 0)) as door:
        found = findings(made(rollout={"server": {"port": door.getsockname()[1]}}, checkpoint={"every": 1}))
    assert [found[name].verdict for name in ("disk", "shared memory", "port", "packages")] == ["fail"] * 4
    assert "checkpoint.keep_last" in found["disk"].mend and "sync.bucket_mib" in found["shared memory"].mend
    assert "is not >=99; no-such-package is not installed" in found["packages"].said and "vllm" not in found["packages"].said


def test_the_trial_is_the_run_made_small(made: Make, tmp_path: Path) -> None:
    cfg = made(rollout={"prompts_per_step": 32}, training={"minibatch_prompts": 8}, evaluation={"every": 0})
    small = trial.trial_of(cfg, tmp_path)
    assert small.rollout.prompts_per_step == 8 and small.training.minibatch_prompts == 2  # as many updates
    assert small.training.steps == 1 and small.run_dir == tmp_path / "trial" and not small.export_hf
    kept = ("model", "parallel", "objective", "optimizer", "reward", "platform", "seed")
    assert all(getattr(small, name) == getattr(cfg, name) for name in kept)


def record(**changes: float) -> dict[str, Any]:
    return {
        "rollout/logprob_diff_mean": 2e-7, "rollout/logprob_diff_max": 2e-5, "accuracy/mean": 0.3, "rollout/truncated": 0.1,
        "rollout/response_tokens_mean": 9.0, "tepo/entropy_noise_floor": 1e-8, "tepo/mask_below_noise": 0.0,
        "seconds/total": 1.0, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "check", "verdict"),
    [
        ({}, None, "pass"),
        ({"rollout/logprob_diff_mean": 1e-3}, "log-probs", "warn"),
        ({"rollout/truncated": 0.8}, "samples", "warn"),
        ({"accuracy/mean": 0.0}, "samples", "warn"),
        ({"tepo/mask_below_noise": 0.4}, "noise of dH", "warn"),
        ({"tepo/entropy_noise_floor": None}, "noise of dH", "skip"),
    ],
)
def test_what_a_step_tells(made: Make, tmp_path: Path, changes: dict[str, Any], check: str | None, verdict: str) -> None:
    cfg = replace(made(), output=str(tmp_path))

    def start(cfg: Config) -> None:
        cfg.run_dir.mkdir(parents=True)
        (cfg.run_dir / "metrics.jsonl").write_text(json.dumps(record(**changes)) + "\n")

    found = {f.check: f.verdict for f in trial.step(cfg, start)}
    expected = dict.fromkeys(("engine", "log-probs", "samples", "noise of dH", "seconds"), "pass")
    assert found == expected | ({check: verdict} if check else {})
