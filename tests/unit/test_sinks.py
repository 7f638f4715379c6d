"""The files of a run on disk, and its output on the screen."""

import json
import logging
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.config import LoggingConfig
from tepo_megatron.monitor import sinks
from tepo_megatron.monitor.sinks import COLUMNS, RunLog, read_metrics, read_steps

RECORD = {column.key: 0.5 for column in COLUMNS} | {"rollout/kept_groups": 12, "loss/total": -0.25}


def test_records_read_back_as_written(tmp_path: Path) -> None:
    with RunLog(tmp_path, LoggingConfig(), steps=2) as log:
        log.write(1, RECORD)
        log.write(2, RECORD | {"loss/kl": None, "tepo/ratio_p99": float("nan"), "actor/grad_norm": float("inf")})
    first, second = read_metrics(tmp_path)
    assert first == {"step": 1, **RECORD}
    assert second == {
        "step": 2, **RECORD, "loss/kl": None, "tepo/ratio_p99": None, "actor/grad_norm": None,
    }  # fmt: skip


def test_evaluations_are_recorded_once_and_survive_a_rewind(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    by_step = {step: {"evaluation/amc/accuracy": step / 8, "evaluation/amc/standard_error": None} for step in (0, 1, 2)}

    def recorded() -> tuple[list[int], list[tuple[int, float]]]:
        board = events.EventAccumulator(str(tmp_path / "tensorboard"))
        board.Reload()
        found = read_steps(tmp_path)
        assert found.evaluations == [{"step": step, **by_step[step]} for step in (0, 1, 2)[: len(found.evaluations)]]
        assert not found.faults and not found.rest
        return [r["step"] for r in found.records], [(e.step, e.value) for e in board.Scalars("evaluation/amc/accuracy")]

    with RunLog(tmp_path, LoggingConfig(tensorboard=True), steps=3) as log:
        log.write_evaluation(0, by_step[0])
        for step in (1, 2):
            log.write(step, RECORD)
            log.write_evaluation(step, by_step[step])
        assert recorded() == ([1, 2], [(0, 0.0), (1, 0.125), (2, 0.25)])
        log.rewind(1, keeps_evaluations=True)  # ranks were restarted; what was evaluated is not evaluated again
        assert recorded() == ([1], [(0, 0.0), (1, 0.125), (2, 0.25)])
        log.write(2, RECORD)
        log.write_evaluation(2, by_step[2])
        assert recorded() == ([1, 2], [(0, 0.0), (1, 0.125), (2, 0.25)])
    with RunLog(tmp_path, LoggingConfig(tensorboard=True), steps=3) as log:
        log.rewind(1)
        assert len(read_steps(tmp_path).evaluations) == 2
        for step in (1, 2):
            log.write_evaluation(step, by_step[step])
        assert recorded() == ([1], [(0, 0.0), (1, 0.125), (2, 0.25)])


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from tepo_megatron.monitor.sinks import RunLog; from tepo_megatron.config import LoggingConfig\n"
        "log = RunLog(Path(sys.argv[1]), LoggingConfig(), steps=10**6)\n"
        "for step in range(1, 10**6): log.write(step, {'padding': 1.0} | {f'key{i}': i for i in range(500)})\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    for _ in range(50):
        assert child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    records = read_metrics(tmp_path)
    assert len(records) >= 40 and [r["step"] for r in records] == list(range(1, len(records) + 1))
    assert all(len(r) == 502 for r in records)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with RunLog(tmp_path, LoggingConfig(), steps=2) as log:
        log.write(1, RECORD)
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:10]))
        with pytest.raises(OSError, match="disk is full"):
            log.write(2, RECORD)
        monkeypatch.undo()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]


def test_warnings_of_two_processes_are_in_one_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The rollout service has the log open, and rank 0 warns, from any thread."""
    program = (
        "import logging, sys, threading; from pathlib import Path\n"
        "from tepo_megatron.monitor.log_file import LogFile\n"
        "with LogFile(Path(sys.argv[1])):\n"
        "    thread = threading.Thread(target=logging.getLogger('tepo_megatron.checkpoint').warning, args=['of a rank'])\n"
        "    thread.start(); thread.join(); logging.getLogger('tepo_megatron').info('nothing'); logging.warning('of others')\n"
    )
    with RunLog(tmp_path, LoggingConfig(), steps=1) as log:
        log.message("before")
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
        logging.getLogger("tepo_megatron.rollout").warning("of the service")
    logging.getLogger("tepo_megatron").warning("too late")
    expected = "before\nwarning: of a rank\nwarning: of the service\n"
    assert (tmp_path / "log.txt").read_text() == expected
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(expected.splitlines())


# The package starts a process of its own, which ends with the one that logs. The second start repeats a step and goes on.
OF_WANDB = """
import sys; from pathlib import Path
from tepo_megatron.config import LoggingConfig; from tepo_megatron.monitor.sinks import RunLog
with RunLog(Path(sys.argv[1]), LoggingConfig(wandb_project="toy"), steps=3) as log:
    if sys.argv[2] == "first":
        log.write_evaluation(0, {"evaluation/amc/accuracy": 0.125, "evaluation/amc/standard_error": None})
        log.write(1, {"reward/mean": 0.5, "loss/kl": None, "tepo/ratio_p99": float("nan")})
        log.write(2, {"reward/mean": 0.75, "loss/kl": 0.25})
        log.write_evaluation(2, {"evaluation/amc/accuracy": 0.25})
    else:
        log.rewind(2)
        log.write(3, {"reward/mean": 1.0})
"""


@pytest.mark.slow
def test_wandb_has_what_was_logged(tmp_path: Path) -> None:
    """The real package, offline: its run file is what it uploads."""
    environment = os.environ | {"WANDB_MODE": "offline"}
    for start in ("first", "second"):
        words = [sys.executable, "-c", OF_WANDB, str(tmp_path), start]
        subprocess.run(words, check=True, timeout=120, env=environment, capture_output=True)
    first, second = (records_of_wandb(path) for path in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb")))
    assert history(first) == {
        0: {"evaluation/amc/accuracy": 0.125},
        1: {"reward/mean": 0.5},
        2: {"reward/mean": 0.75, "loss/kl": 0.25, "evaluation/amc/accuracy": 0.25},
    }
    assert history(second) == {3: {"reward/mean": 1.0}}
    runs = [next(record.run for record in records if record.HasField("run")) for records in (first, second)]
    assert {(run.project, run.display_name, run.run_id) for run in runs} == {("toy", tmp_path.name, sinks.wandb_id(tmp_path))}


def records_of_wandb(path: Path) -> list[Any]:
    """Read W&B's run file: 7 bytes, then blocks of 32 KiB with pieces of records (CRC-32, length, place of the piece)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, records, piece = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # no room for a head
            at += 2**15 - at % 2**15
            continue
        _, length, place = struct.unpack_from("<IHB", data, at)
        at, piece = at + 7 + length, piece + data[at + 7 : at + 7 + length]
        if place in (1, 4):  # a whole record, or its last piece
            records.append(Record.FromString(piece))
            piece = b""
    return records


def history(records: list[Any]) -> dict[int, dict[str, float]]:
    """Return the values by step, without those of W&B itself, whose names begin with "_"."""
    rows: dict[int, dict[str, float]] = {}
    for record in records:
        if record.HasField("history"):
            values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows[values["_step"]] = {key: value for key, value in values.items() if not key.startswith("_")}
    return rows


@pytest.mark.parametrize(
    ("module", "cfg"),
    [("wandb", LoggingConfig(wandb_project="toy")), ("torch.utils.tensorboard", LoggingConfig(tensorboard=True))],
)
def test_a_sink_that_is_not_installed_is_named(
    module: str, cfg: LoggingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it now raises ImportError
    with pytest.raises(ConfigError, match=r"logging\..*not installed; install tepo-megatron\["):
        RunLog(tmp_path, cfg, steps=1)


def test_malformed_metrics_are_named_by_file_and_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / sinks.METRICS_FILE
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot read"):
        read_metrics(tmp_path)
    path.write_text("")
    with pytest.raises(DataError, match="no step has been recorded"):
        read_metrics(tmp_path)
    path.write_text('{"step": 2, "rew\n')
    with pytest.raises(DataError, match=r"no step has been recorded yet; line 1 cannot be read: not valid JSON"):
        read_metrics(tmp_path)
    path.write_text('{"step": 1}\n{"reward/mean": 2}\n{"step": 3}')
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 3]
    assert [record.getMessage() for record in caplog.records] == [
        f'{path}: line 2 cannot be read: not an object with an integer "step"',
        f"{path}: no record of step 2, and what is lost cannot be made again",
    ]


def test_foreign_text_reaches_neither_terminal_nor_log_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path, LoggingConfig(), steps=1) as log:
        log.message("model \x1b[31mred\x07 \u202egnp.exe\nand \u00fc \U0001f600")
    printed = capsys.readouterr().out
    assert printed == "model \\x1b[31mred\\x07 \\u202egnp.exe\nand \u00fc \U0001f600\n"
    assert (tmp_path / "log.txt").read_text() == printed
