"""The folder of a run: what resume and overwrite find, keep, refuse and remove."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.monitor import run_dir
from tepo_megatron.monitor.sinks import LOST_FILE, METRICS_FILE, RunLog, read_metrics


def config(folder: Path, **change: object) -> Config:
    return validate({"name": "a", "model": {"path": "m"}, "data": {"train": "t"}, "output": str(folder), **change})


def write_run(folder: Path, *names: str) -> Path:
    for name in names:
        file = folder / "a" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{name}\n")
    return folder / "a"


def files(run: Path) -> set[str]:
    return {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}


RUN = ("metrics.jsonl", "log.txt", "checkpoints/step-00000002/run.json", "rollouts/step-000001.safetensors", "hf/config.json")
END = ("summary.json", "evaluation.jsonl", "report.png")


def test_a_run_that_goes_on_keeps_its_outcome_under_another_name(tmp_path: Path) -> None:
    run = write_run(tmp_path, *RUN, *END)
    for _ in range(2):
        run_dir.prepare(config(tmp_path, resume=True))
        assert files(run) >= {*RUN, *END, "config.yaml"}, "a resume that is refused later leaves a finished run finished"
    for _ in range(2):
        run_dir.rename_outcome(run)
        assert files(run) == {*RUN, "config.yaml", "summary.former.json", "evaluation.former.jsonl", "report.png"}
    assert (run / "summary.former.json").read_text() == "summary.json\n"


def test_a_run_is_finished_when_nothing_is_left_to_do(tmp_path: Path) -> None:
    def ask(steps: int, **change: object) -> bool:
        return run_dir.finished(config(tmp_path, **{"resume": True, "training": {"steps": steps}} | change))

    assert not ask(3)
    run = write_run(tmp_path, *RUN, *END)
    assert not ask(3), "not a summary"
    (run / "summary.json").write_text('{"steps": 3}')
    assert ask(3) and not ask(4) and not ask(3, resume=False)
    with pytest.raises(ConfigError, match=r"training\.steps=2: the run in .* ended at step 3; set it to more"):
        ask(2)
    shutil.rmtree(run / "hf")
    assert not ask(3) and ask(3, export_hf=False)


def test_resume_keeps_the_log_of_a_start_that_failed(tmp_path: Path) -> None:
    run = write_run(tmp_path, "log.txt", "server.log")
    run_dir.prepare(config(tmp_path, resume=True))
    assert files(run) == {"config.yaml", "log.txt", "server.log"}
    run_dir.prepare(config(tmp_path))
    assert files(run) == {"config.yaml"}


def test_lost_records_alone_are_a_run(tmp_path: Path) -> None:
    """The run's first step was undone and taken again when the second kill came."""
    run = write_run(tmp_path, "metrics.lost.jsonl")
    with pytest.raises(ConfigError, match=r"holds a run already"):
        run_dir.prepare(config(tmp_path))
    run_dir.prepare(config(tmp_path, resume=True))
    assert files(run) == {"config.yaml", "metrics.lost.jsonl"}


def test_resume_of_a_finished_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, "metrics.jsonl", *END, "checkpoints/step-00000002.partial/run.json")
    before = files(run)
    with pytest.raises(ConfigError, match=r"has ended and kept no checkpoints.*--overwrite true"):
        run_dir.prepare(config(tmp_path, resume=True))
    assert files(run) == before
    (run / "summary.json").unlink()  # it was cut off
    run_dir.prepare(config(tmp_path, resume=True))


def test_sampling_alone_is_not_resumed_over_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, *RUN)
    with pytest.raises(ConfigError, match=r"rollout\.only=true keeps no checkpoints"):
        run_dir.prepare(config(tmp_path, resume=True, rollout={"only": True}))
    assert files(run) == set(RUN)


def test_overwrite_removes_a_run_with_all_that_it_can_hold(tmp_path: Path) -> None:
    mine = write_run(
        tmp_path, *RUN, *END, "summary.former.json", "metrics.lost.jsonl", "hf.former/x", "hf.partial/x", "notes.txt"
    )
    run_dir.prepare(config(tmp_path, overwrite=True))
    assert files(mine) == {"config.yaml", "notes.txt"}


def test_a_recording_is_not_removed_by_the_run_that_replays_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, *RUN)
    with pytest.raises(ConfigError, match=r"rollout\.replay=.* lies in the run that would be replaced"):
        run_dir.prepare(config(tmp_path, overwrite=True, rollout={"replay": str(run / "rollouts")}))
    assert files(run) == set(RUN)


def test_checkpoints_alone_are_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, "checkpoints/step-00000002/run.json")
    with pytest.raises(ConfigError, match=r"holds a run already; go on with it with tepo resume"):
        run_dir.prepare(config(tmp_path))
    assert files(run) == {"checkpoints/step-00000002/run.json"}


def test_a_run_under_way_is_left_alone(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    run_dir.prepare(cfg)
    with RunLog(cfg.run_dir, cfg.logging, steps=2) as log:
        with pytest.raises(ConfigError, match=r"under way in another process"):
            run_dir.prepare(cfg)  # nothing is recorded yet
        log.write(1, {"reward/mean": 0.5})
        for change in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(ConfigError, match=r"under way in another process"):
                run_dir.prepare(replace(cfg, **change))
        with pytest.raises(ConfigError, match=r"under way in another process"):
            RunLog(cfg.run_dir, cfg.logging, steps=2)
        assert len(read_metrics(cfg.run_dir)) == 1
    run_dir.prepare(replace(cfg, overwrite=True))
    assert not (cfg.run_dir / METRICS_FILE).exists()


def test_lost_records_move_once_whenever_the_move_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(tmp_path)
    run_dir.prepare(cfg)
    lost = cfg.run_dir / LOST_FILE

    def cut_off(*_: object) -> None:
        raise InterruptedError

    with RunLog(cfg.run_dir, cfg.logging, steps=9) as log:
        assert log.rewind(0) == [] and not lost.exists()
        log.write(1, {"x": 1.0})
        log.write(2, {"x": 2.0})
        with (cfg.run_dir / METRICS_FILE).open("ab") as file:
            file.write(b'{"step": 3, ')  # a kill in the midst of a line
        assert [r["step"] for r in read_metrics(cfg.run_dir)] == [1, 2]
        for place in ("replace", "ftruncate"):
            with monkeypatch.context() as patched, pytest.raises(InterruptedError):
                patched.setattr(os, place, cut_off)
                log.rewind(1)
            assert [r["step"] for r in read_metrics(cfg.run_dir)] == [1, 2]
        assert "1 recorded steps are taken again; their former records moved to metrics.lost.jsonl" in log.rewind(1)
        assert [r["step"] for r in read_metrics(cfg.run_dir)] == [1]
        assert lost.read_text() == '{"step": 3, \n{"step": 2, "x": 2.0}\n'
        log.write(2, {"x": 3.0})
        assert len(log.rewind(1)) == 1
    assert lost.read_text() == '{"step": 3, \n{"step": 2, "x": 2.0}\n{"step": 2, "x": 3.0}\n'


def test_tensorboard_forgets_what_is_taken_again(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    cfg = config(tmp_path, logging={"tensorboard": True})
    run_dir.prepare(cfg)
    with RunLog(cfg.run_dir, cfg.logging, steps=9) as log:
        log.write(1, {"x": 1.0})
        log.write(2, {"x": 2.0})
        log.write(3, {"x": 3.0})
    with RunLog(cfg.run_dir, cfg.logging, steps=9) as log:
        assert [line.split()[0] for line in log.rewind(1)] == ["2"]
        log.write(2, {"x": 4.0})
    accumulator = events.EventAccumulator(str(cfg.run_dir / "tensorboard"))
    accumulator.Reload()
    assert [(e.step, e.value) for e in accumulator.Scalars("x")] == [(1, 1.0), (2, 4.0)]
