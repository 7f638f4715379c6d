"""Recorded rollouts in the place of an engine: the run that recorded them comes out again, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.types import Rollout
from tepo_megatron.config import Config
from tepo_megatron.monitor.metrics import Metrics
from tepo_megatron.monitor.tracer import Clock
from tepo_megatron.rollout import record
from tepo_megatron.rollout.record import Replay
from tests.parallel import resume_worlds as w
from tests.parallel.resume_worlds import Kill


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return w.write_inputs(tmp_path_factory.mktemp("inputs") / "model")


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run that was killed and resumed while it recorded: its recordings are those of one course."""
    folder = tmp_path_factory.mktemp("recorded")
    cfg = w.run_config(model, folder, rollout={"record": True}, checkpoint={"every": 2, "asynchronous": False})
    w.lineage(cfg, folder / "journal", Kill("tepo_megatron.monitor.sinks:RunLog.write", step=3))
    return cfg


def replaying(cfg: Config, output: Path, **changes: Any) -> Config:
    rollouts = replace(cfg.rollout, record=False, only=False, replay=str(cfg.run_dir / record.FOLDER))
    return replace(cfg, output=str(output), rollout=rollouts, **changes)


@pytest.mark.slow
def test_a_replay_makes_the_same_records_and_weights_without_an_engine(recorded: Config, tmp_path: Path) -> None:
    cfg = replaying(recorded, tmp_path)
    w.attempt(cfg, tmp_path / "journal")
    assert not (tmp_path / "journal").exists(), "an engine was asked"
    log = (cfg.run_dir / "log.txt").read_text()
    assert "safety check log-probs of engine and actor (sync.max_logprob_diff): OFF, rollout.replay has no engine" in log
    assert w.records(cfg.run_dir) == w.records(recorded.run_dir)
    again, first = w.weights(cfg.run_dir), w.weights(recorded.run_dir)
    assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.slow
def test_what_a_kill_undid_is_set_aside(recorded: Config) -> None:
    names = sorted(p.name for p in (recorded.run_dir / record.FOLDER).iterdir())
    assert names == sorted(["step-000003.lost", *(f"step-{step:06d}.safetensors" for step in range(1, w.STEPS + 1))])


def rollouts() -> list[Rollout]:
    ids, mask = torch.arange(1, 7), torch.arange(6) >= 3
    return [Rollout(p, ids + p, mask, -torch.rand(6) * mask, 0, "stop", "1", float(p), float(p), "equal") for p in (0, 1)]


def test_missing_and_damaged_recordings_are_named(tmp_path: Path) -> None:
    record.write(tmp_path, 1, rollouts(), Metrics())
    found, _ = Replay(tmp_path).collect(1, Clock())
    assert [r.prompt_id for r in found] == [0, 1]
    with pytest.raises(DataError, match=r"step-000002\.safetensors: no rollouts of step 2 were recorded"):
        Replay(tmp_path).collect(2, Clock())
    path = record.file_of(tmp_path, 1)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[:8], b"\xff" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(
            DataError, match=r"step-000001\.safetensors: not the recorded rollouts of a step.*record them again"
        ):
            Replay(tmp_path).collect(1, Clock())


@pytest.mark.parametrize("position", [0.02, 0.2, 0.5, 0.9, 0.999])
def test_a_flipped_bit_is_found(tmp_path: Path, position: float) -> None:
    record.write(tmp_path, 1, rollouts(), Metrics())
    path = record.file_of(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[int(position * len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"step-000001\.safetensors"):
        Replay(tmp_path).collect(1, Clock())


def test_recordings_of_steps_that_are_taken_again_are_set_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        record.write(tmp_path, step, rollouts(), Metrics())
    record.set_aside(tmp_path, after=1)
    record.set_aside(tmp_path, after=1)
    record.set_aside(tmp_path / "no such folder", after=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001.safetensors", "step-000002.lost", "step-000003.lost"]
