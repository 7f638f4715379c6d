"""Machine faults and their required outcomes, for a scripted engine (e2e/test_hurt_runs.py) or real ones (harness/hurt.py).

Each fault is a function of the runs that it disturbs and of an empty folder. Afterwards a run has continued, or was resumed,
and equals an undisturbed one, bit for bit. It raises AssertionError, or skips where the machine cannot be set up.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import signal
import sys
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.e2e.conftest import Command
from tests.harness.chaos import roles_of
from tests.hurting import NOTHING, Clock, disk, ext4, memory_group, slow_group
from tests.living_folder import paths_below
from tests.parallel.resume_worlds import records, weights

Hurt = Callable[["Runs", Path], None]


@dataclass(frozen=True)
class Runs:
    """The start of runs of one kind, and the result of the undisturbed run.

    Attributes:
        start: See `tests.e2e.conftest.commands`.
        words: (folder of runs, name, more settings) -> the command line.
        straight: Folder of the undisturbed run.
        steps: Steps of a run; a checkpoint is written at every second one.
        slow: Behaviour of the scripted engine where a run is disturbed meanwhile. None: the engine is real.
        good: Its behaviour elsewhere.
        bound: Seconds of each wait, as `Command` takes them.
    """

    start: Callable[..., Command]
    words: Callable[..., list[str]]
    straight: Path
    steps: int
    slow: str | None
    good: str | None
    bound: float

    def lines(self, run: Path) -> int:
        """Return the number of recorded steps."""
        path = run / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def in_the_middle(self, command: Command, run: Path) -> contextlib.AbstractContextManager[None]:
        """Stop the run, for the block, where there is a checkpoint to resume from, a step after it, and a step to come.

        Args:
            command: The running command.
            run: Folder of the run.
        """
        return command.stopped_when(lambda: newest(run) >= 2 and 3 <= self.lines(run) < self.steps, timeout=self.bound)

    def ended(self, command: Command, *phrases: str) -> str:
        """Wait for the failure; return its only error message, which matches all the phrases.

        Args:
            command: The running command.
            phrases: Regular expressions.
        """
        assert command.wait(self.bound) == 1, command.output
        assert command.output.count("tepo: error:") == 1 and "Traceback" not in command.output, command.output
        message = command.output.partition("tepo: error:")[2]
        for phrase in phrases:
            assert re.search(phrase, message), (phrase, message)
        command.assert_nothing_left()
        return message

    def ends_well(self, command: Command) -> None:
        """Wait for a successful end."""
        assert command.wait(self.bound) == 0, command.output
        command.assert_nothing_left()

    def resumed(self, line: list[str], run: Path, **how: Any) -> None:
        """Resume the run; it continues from its last complete checkpoint.

        Args:
            line: Command line of the run.
            run: Folder of the run.
            how: Further arguments of `start`.
        """
        last = newest(run)
        command = self.start(*line, "--resume", "true", engine=self.good, **how)
        self.ends_well(command)
        assert f"resume: from the checkpoint of step {last}" in command.output

    def same(self, run: Path) -> None:
        """Assert that every record and weight is that of the undisturbed run, bit for bit, and that no answer was lost."""
        found, expected = _of_no_machine(run), _of_no_machine(self.straight)
        assert [row["step"] for row in found] == list(range(1, self.steps + 1))
        for row, straight in zip(found, expected, strict=True):
            other = [name for name in row | straight if row.get(name) != straight.get(name)]
            here_and_there = {name: (row.get(name), straight.get(name)) for name in other}
            assert not other, f"step {row['step']}, this run and the undisturbed one: {here_and_there}"
        ours, theirs = weights(run), weights(self.straight)
        assert ours and ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours), "weights"
        assert all(row["grading/died"] == 0 for row in found)
        unfinished = [path for path in paths_below(run) if ".partial" in path.name or ".deleted" in path.name]
        assert not unfinished, unfinished


def _of_no_machine(run: Path) -> list[dict[str, Any]]:
    """Return its records without the measurements of the machine."""
    return [{name: value for name, value in row.items() if not name.startswith("memory/")} for row in records(run)]


def _bytes_to_read(pid: int) -> int:
    """Return the number of bytes that wait in the pipe of a process's standard input."""
    with open(f"/proc/{pid}/fd/0", "rb", buffering=0) as pipe:
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def newest(run: Path) -> int:
    """Return the step of its last complete checkpoint; 0: there is none."""
    return max((int(p.name.removeprefix("step-")) for p in run.glob("checkpoints/step-????????")), default=0)


def _memory_of_a_grader_and_a_rank(runs: Runs, folder: Path) -> None:
    """The kernel kills a grader, whose answer is graded again, and then a rank: the ranks are restarted."""
    line, run = runs.words(folder / "runs", "memory"), folder / "runs" / "memory"
    with memory_group(NOTHING) as group:
        command = runs.start(*line, engine=runs.slow)
        command.until(lambda: runs.lines(run) >= 1, timeout=runs.bound)
        grader = roles_of(command.process.pid)["grader"][0].pid
        os.kill(grader, signal.SIGSTOP)
        command.until(lambda: _bytes_to_read(grader) > 0, timeout=runs.bound)  # it has an answer to grade
        group.exhaust(grader)
        command.until(lambda: group.kills() == 1, timeout=runs.bound)
        command.until(lambda: "its answer is graded again" in command.output, timeout=runs.bound)
        assert re.search(r"warning: grading worker \d+ was ended by SIGKILL: probably the kernel killed it", command.output)
        with runs.in_the_middle(command, run):
            rank = roles_of(command.process.pid)["rank 1"][0].pid
            group.exhaust(rank)
        runs.ends_well(command)
        assert group.kills() == 2
    said = rf"rank \d \(pid {rank}\) was ended by SIGKILL: probably the kernel killed it for memory.*more memory"
    assert re.search(said, command.output) and re.search(said, (run / "log.txt").read_text()), command.output
    assert command.output.count("the ranks are restarted from the checkpoint of step") == 1, command.output
    runs.same(run)


def _memory_of_an_engine(runs: Runs, folder: Path) -> None:
    """The kernel kills the model's process of a real engine: its server is started again, and the run continues."""
    run = folder / "runs" / "engine"
    with memory_group(NOTHING) as group:
        command = runs.start(*runs.words(folder / "runs", "engine"), engine=runs.slow)
        command.until(lambda: runs.lines(run) >= 1, timeout=runs.bound)
        engines = roles_of(command.process.pid)["engine"]
        group.exhaust(max(engines, key=lambda process: process.memory_info().rss).pid)
        command.until(lambda: group.kills() == 1, timeout=runs.bound)
        command.until(lambda: "is started again" in command.output, timeout=runs.bound)
        runs.ends_well(command)
    said = re.search(r"the kernel (has )?killed .* for memory", command.output)
    assert said and command.output.count("is started again") == 1, command.output
    runs.same(run)


def _disk_that_is_full(runs: Runs, folder: Path) -> None:
    """The disk becomes full in mid-run. A resume is refused while it is full, and works once there is space."""
    with disk(folder / "disk", 'mount -t tmpfs -o size=256m tmpfs "$1"') as small:
        line, run, by = runs.words(small.folder, "full"), small.outside / "full", small.by(sys.executable)
        command = runs.start(*line, engine=runs.slow, by=by)
        with runs.in_the_middle(command, run):
            ballast = small.fill()
        full = r"the disk is full \(.*\d MiB free\); free some space"
        runs.ended(command, rf"{small.folder}/full/\S+", full, "--resume true")
        last = newest(run)

        again = runs.start(*line, "--resume", "true", engine=runs.good, by=by)
        runs.ended(again, str(small.folder), "the disk is full")
        assert newest(run) == last, "the disk is full still, and the checkpoint is lost"
        ballast.unlink()
        runs.resumed(line, run, by=by)
        runs.same(run)


def _disk_that_becomes_read_only(runs: Runs, folder: Path) -> None:
    """The disk becomes read-only in mid-run, as after an error in the kernel, and is repaired later."""
    image = folder / "image"
    with disk(folder / "disk", ext4(image, 256), "mkfs.ext4", "e2fsck") as failing:
        line, run, by = runs.words(failing.folder, "failing"), failing.outside / "failing", failing.by(sys.executable)
        fault = Path("/sys/fs/ext4") / failing.device() / "trigger_fs_error"
        if not fault.exists():
            pytest.skip(f"this kernel has no {fault}")
        command = runs.start(*line, engine=runs.slow, by=by)
        with runs.in_the_middle(command, run):
            fault.write_text("an error for a test")
        reasons = r"(its file system is read-only|the disk failed).*see `dmesg`"
        runs.ended(command, rf"{failing.folder}/failing/\S+", reasons, "--resume true")

        runs.ended(runs.start(*line, "--resume", "true", engine=runs.good, by=by), str(failing.folder))
        failing.do(f"umount {failing.folder}; e2fsck -fy {image} || test $? -le 1; mount -o loop {image} {failing.folder}")
        runs.resumed(line, run, by=by)
        runs.same(run)


def _disk_that_is_slow(runs: Runs, folder: Path) -> None:
    """A checkpoint takes seconds instead of milliseconds to reach the disk; the run waits, and no watchdog ends it."""
    rate = 2 * 2**20
    with disk(folder / "disk", ext4(folder / "image", 256), "mkfs.ext4") as slow:
        device = (Path("/sys/block") / slow.device() / "dev").read_text().strip()
        with slow_group(device, rate) as group:
            by = ["sh", "-c", f'echo $$ > {group.folder}/cgroup.procs && exec "$@"', "sh", *slow.by(sys.executable)]
            line, run = runs.words(slow.folder, "slow", checkpoint__every=runs.steps // 2), slow.outside / "slow"
            runs.ends_well(runs.start(*line, engine=runs.good, by=by))
        sizes = re.findall(r"checkpoint of step \d+: (\d+) MiB complete after ([\d.]+) s", (run / "log.txt").read_text())
        assert len(sizes) == 2 and all(float(seconds) > 0.5 * float(size) * 2**20 / rate > 1 for size, seconds in sizes), sizes
        runs.same(run)


def _clock_that_jumps(runs: Runs, folder: Path) -> None:
    """The clock jumps forwards and back by hours, every half second, in every process of the run, in whatever language."""
    clock, over = Clock(folder), threading.Event()
    clock.set(10 * 365 * 86400)

    def jump() -> None:
        at = 0
        while not over.wait(0.5):
            at += 1
            clock.set((-1) ** at * at * 3 * 3600)

    thread = threading.Thread(target=jump)
    line, run = runs.words(folder / "runs", "clock"), folder / "runs" / "clock"
    command = runs.start(*line, engine=runs.slow, env=clock.env)
    try:
        lock = run / "run.lock"
        with command.stopped_when(lambda: lock.exists() and b"since" in lock.read_bytes(), timeout=runs.bound):
            years = int(json.loads(lock.read_text())["since"][:4])
            thread.start()
            runs.ended(runs.start(*line, "--resume", "true", engine=runs.good, env=clock.env), "under way in another process")
        with command.stopped_when(lambda: 1 <= runs.lines(run) < runs.steps, timeout=runs.bound):
            roles = {name: found for name, found in roles_of(command.process.pid).items() if found}
            blind = [name for name, found in roles.items() if not any(_sees(process, clock) for process in found)]
        assert command.wait(runs.bound) == 0, command.output
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
    command.assert_nothing_left()
    assert years >= datetime.date.today().year + 9, "the run's processes did not see the clock of this test"
    expected = "rank 0" if runs.slow else "engine"
    assert expected in roles and not blind, f"they do not see the clock of this test: {blind} of {list(roles)}"
    rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [value for row in rows for name, value in row.items() if name.startswith("seconds/")]
    assert measured and all(value is None or 0 <= value < 3 * runs.bound for value in measured)
    runs.same(run)


def _sees(process: psutil.Process, clock: Clock) -> bool:
    """Return whether a process reads this clock."""
    try:
        return clock.env["LD_PRELOAD"] in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:  # it has ended
        return False


def _few_open_files(runs: Runs, folder: Path) -> None:
    """A hard limit on open files that is too low is refused with the required number, which then suffices.

    With the required hard limit, and a soft limit that is too low, the run ends well.
    """

    def limited(soft: int, hard: int) -> list[str]:
        return ["sh", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "sh", sys.executable]

    line, run = runs.words(folder / "runs", "files"), folder / "runs" / "files"
    message = runs.ended(runs.start(*line, engine=runs.good, by=limited(64, 100)), "may open 100 files here", "`ulimit -n")
    assert not run.exists()
    found = re.search(r"this run needs (\d+)", message)
    assert found
    runs.ends_well(runs.start(*line, engine=runs.good, by=limited(64, int(found[1]))))
    runs.same(run)


# faults by name that need the process of a real engine
OF_REAL_ENGINES: dict[str, Hurt] = {"memory of an engine": _memory_of_an_engine}
OF_ALL: dict[str, Hurt] = {
    "memory of a grader and a rank": _memory_of_a_grader_and_a_rank,
    "full disk": _disk_that_is_full,
    "read-only disk": _disk_that_becomes_read_only,
    "slow disk": _disk_that_is_slow,
    "clock": _clock_that_jumps,
    "open files": _few_open_files,
}
