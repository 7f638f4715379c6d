"""Runs on machines that fail them: out of memory, full, read-only and slow disks, a clock that jumps. All go on bit-equal."""

from __future__ import annotations

import datetime
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import Command, commands, settings
from tests.e2e.test_faults import SHORT, whole_lines
from tests.hurting import NOTHING, Clock, disk, ext4, memory_group, slow_group
from tests.parallel.resume_worlds import records, weights
from tests.tiny import tiny_qwen3

pytestmark = [pytest.mark.e2e, pytest.mark.full]
BOUND = 120.0  # seconds, of a run; of each wait in one
RUN: dict[str, Any] = SHORT | {
    "training__steps": 8, "checkpoint__every": 2, "optimizer__lr": "1e-4", "parallel__tp": 2, "reward__workers": 1,
}  # fmt: skip
Start = Callable[..., Command]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with answers that only a grader can tell from wrong ones."""
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3(path, layers=2)
    rows = [{"prompt": f"1/{i}?\n", "answer": f"\\frac{{1}}{{{i}}}"} for i in range(2, 82)]
    for name in ("train.jsonl", "eval.jsonl"):
        (path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def words(model: Path, output: Path, name: str, **more: Any) -> list[str]:
    return ["train", "examples/demo.yaml", *settings(model, output=output, name=name, **RUN | more)]


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight")
    with commands(folder) as start:
        command = start(*words(model, folder, "run"), engine="good")
        assert command.wait(BOUND) == 0, command.output
    yield folder / "run"


def same(run: Path, straight: Path) -> None:
    """Every record and every weight, bit for bit, and no answer was lost."""
    assert records(run) == records(straight) and [r["step"] for r in records(run)] == list(range(1, RUN["training__steps"] + 1))
    found, expected = weights(run), weights(straight)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(row["grading/died"] == 0 for row in records(run))


def ended(command: Command, *phrases: str) -> str:
    """Its one message, which has all the phrases."""
    assert command.wait(BOUND) == 1, command.output
    assert command.output.count("tepo: error:") == 1 and "Traceback" not in command.output, command.output
    message = command.output.partition("tepo: error:")[2]
    for phrase in phrases:
        assert re.search(phrase, message), (phrase, message)
    command.assert_nothing_left()
    return message


def newest(run: Path) -> int:
    return max((int(p.name.removeprefix("step-")) for p in run.glob("checkpoints/step-????????")), default=0)


def resumed(start: Start, line: list[str], run: Path, **how: Any) -> None:
    """Goes on from the last checkpoint that was complete."""
    last = newest(run)
    command = start(*line, "--resume", "true", engine="good", **how)
    assert command.wait(BOUND) == 0, command.output
    assert f"resume: from the checkpoint of step {last}" in command.output
    command.assert_nothing_left()


def test_the_kernel_kills_a_grader_and_then_a_rank_for_memory(tepo: Start, model: Path, straight: Path, tmp_path: Path) -> None:
    line, run = words(model, tmp_path / "runs", "memory"), tmp_path / "runs" / "memory"
    with memory_group(NOTHING) as group:
        command = tepo(*line, engine="slow")
        command.until(lambda: len(whole_lines(run)) >= 1, timeout=BOUND)
        group.add(command.oldest_server("grading/worker.py"))
        command.until(lambda: group.kills() == 1, timeout=BOUND)
        command.until(lambda: "its answer is graded again" in command.output, timeout=BOUND)
        assert re.search(r"warning: grading worker \d+ was ended by SIGKILL: probably the kernel killed it", command.output)
        command.until(lambda: newest(run) >= 2 and len(whole_lines(run)) >= 4, timeout=BOUND)
        ranks = [int(found.split()[0]) for found in command.left_over() if "scripted_worker" in found]
        group.add(max(ranks))
        message = ended(command, r"rank \d \(pid \d+\) was ended by SIGKILL: probably the kernel killed it for memory")
        assert f"(pid {max(ranks)})" in message and "more memory" in message and "--resume true" in message
        assert group.kills() == 2
    assert message.strip() in (run / "log.txt").read_text()
    resumed(tepo, line, run)
    same(run, straight)


def test_a_disk_that_is_full_and_then_has_space(tepo: Start, model: Path, straight: Path, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 'mount -t tmpfs -o size=256m tmpfs "$1"') as small:
        line, run, by = words(model, small.folder, "full"), small.outside / "full", small.by(sys.executable)
        command = tepo(*line, engine="slow", by=by)
        command.until(lambda: newest(run) >= 2 and len(whole_lines(run)) >= 3, timeout=BOUND)
        ballast = small.fill()
        ended(command, rf"{small.folder}/full/\S+", r"the disk is full \(.*\d MiB free\); free some space", "--resume true")
        last = newest(run)

        again = tepo(*line, "--resume", "true", engine="good", by=by)
        ended(again, str(small.folder), "the disk is full")
        assert newest(run) == last, "the disk is full still, and the checkpoint is lost"
        ballast.unlink()
        resumed(tepo, line, run, by=by)
        same(run, straight)


def test_a_disk_that_becomes_read_only(tepo: Start, model: Path, straight: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with disk(tmp_path / "disk", ext4(image, 256), "mkfs.ext4", "e2fsck") as failing:
        line, run, by = words(model, failing.folder, "failing"), failing.outside / "failing", failing.by(sys.executable)
        fault = Path("/sys/fs/ext4") / failing.device() / "trigger_fs_error"
        if not fault.exists():
            pytest.skip(f"this kernel has no {fault}")
        command = tepo(*line, engine="slow", by=by)
        command.until(lambda: newest(run) >= 2 and len(whole_lines(run)) >= 3, timeout=BOUND)
        fault.write_text("an error for a test")
        reasons = r"(its file system is read-only|the disk failed).*see `dmesg`"
        ended(command, rf"{failing.folder}/failing/\S+", reasons, "--resume true")

        ended(tepo(*line, "--resume", "true", engine="good", by=by), str(failing.folder))
        failing.do(f"umount {failing.folder}; e2fsck -fy {image} || test $? -le 1; mount -o loop {image} {failing.folder}")
        resumed(tepo, line, run, by=by)
        same(run, straight)


def test_a_disk_that_is_slow(tepo: Start, model: Path, straight: Path, tmp_path: Path) -> None:
    """A checkpoint takes seconds instead of milliseconds to be on the disk; the run waits, and nothing takes it for hung."""
    rate = 2 * 2**20
    with disk(tmp_path / "disk", ext4(tmp_path / "image", 256), "mkfs.ext4") as slow:
        device = (Path("/sys/block") / slow.device() / "dev").read_text().strip()
        with slow_group(device, rate) as group:
            by = ["sh", "-c", f'echo $$ > {group.folder}/cgroup.procs && exec "$@"', "sh", *slow.by(sys.executable)]
            line, run = words(model, slow.folder, "slow", checkpoint__every=4), slow.outside / "slow"
            command = tepo(*line, engine="good", by=by)
            assert command.wait(BOUND) == 0, command.output
            command.assert_nothing_left()
        sizes = re.findall(r"checkpoint of step \d+: (\d+) MiB complete after ([\d.]+) s", (run / "log.txt").read_text())
        assert len(sizes) == 2 and all(float(seconds) > 0.5 * float(size) * 2**20 / rate > 1 for size, seconds in sizes)
        same(run, straight)


def test_a_clock_that_jumps_by_hours(tepo: Start, model: Path, straight: Path, tmp_path: Path) -> None:
    """Forwards and back, every half second, in every process of the run, whatever language reads it."""
    clock, over = Clock(tmp_path), threading.Event()
    clock.set(10 * 365 * 86400)

    def jump() -> None:
        at = 0
        while not over.wait(0.5):
            at += 1
            clock.set((-1) ** at * at * 3 * 3600)

    thread = threading.Thread(target=jump)
    line, run = words(model, tmp_path / "runs", "clock"), tmp_path / "runs" / "clock"
    command = tepo(*line, engine="slow", env=clock.env)
    try:
        command.until(lambda: (run / "run.lock").exists() and b"since" in (run / "run.lock").read_bytes(), timeout=BOUND)
        years = int(json.loads((run / "run.lock").read_text())["since"][:4])
        thread.start()
        command.until(lambda: len(whole_lines(run)) >= 1, timeout=BOUND)
        ended(tepo(*line, "--resume", "true", engine="good", env=clock.env), "this run is under way in another process")
        assert command.wait(BOUND) == 0, command.output
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
    command.assert_nothing_left()
    assert years >= datetime.date.today().year + 9, "the run's processes did not see the clock of this test"
    measured = [value for row in whole_lines(run) for name, value in row.items() if name.startswith("seconds/")]
    assert measured and all(value is None or 0 <= value < 3 * BOUND for value in measured)
    same(run, straight)
