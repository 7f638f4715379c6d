"""The process group of one task: started, read while it runs, and ended with everything that it started."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import lines
from benchmarks.gpu.check.machine import last_line
from benchmarks.gpu.check.parts import CheckPart, CheckTask
from benchmarks.gpu.check.report import TaskResult, status_of
from benchmarks.results import ROOT
from tepo_megatron.utils.processes import die_with_parent

GRACE = 3.0  # seconds between SIGTERM and SIGKILL, in which launchers end their ranks, and after SIGKILL
POLL_SECONDS = 0.1  # between two looks at a task's lines


def environment(platform: str) -> dict[str, str]:
    """Return the environment of a task: the project from its folder, no network, few threads because of the many ranks."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if platform == "cpu" else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    tests = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the machine's image may have plugins that take seconds
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **offline, **threads, **hidden, **tests}


def run_task(
    part: CheckPart, task: CheckTask, platform: str, folder: Path, seconds: float, keep: Callable[[TaskResult], None]
) -> TaskResult:
    """Run a task and return its result.

    Args:
        part: Its part.
        task: The task.
        platform: "cpu" or "cuda".
        folder: Scratch space of all tasks.
        seconds: Its time limit.
        keep: Gets the result so far when the task starts, and whenever it has reported a line.
    """
    name = re.sub(r"\W", "-", f"{part.name}-{task.name}")
    file, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    start = time.monotonic()
    words = ["-m", "benchmarks.gpu.check.part", part.module, task.name, platform, str(folder), str(file)]
    status = _ended(
        [sys.executable, *words, str(start + seconds)], environment(platform), log, file, start + seconds,
        lambda: keep(TaskResult(task, "running", lines.read(file), "not done yet", {})),
    )  # fmt: skip
    reported = lines.read(file)
    more: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1), "limit": round(seconds, 1), "exit_status": status}
    outcome = status_of(reported)
    if status == 0 and outcome != "failed":
        return TaskResult(task, outcome, reported, "", more)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    print(tail, file=sys.stderr, flush=True)
    more["log"] = tail[-4000:]
    if status == 0:
        return TaskResult(task, "failed", reported, "", more)
    if status is None:
        return TaskResult(task, "cut off", reported, f"cut off after {seconds:.0f} s{_place(tail)}", more)
    how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
    return TaskResult(task, "failed", reported, f"ended with {how}: {last_line(tail)}", more)


def _ended(
    words: list[str], env: dict[str, str], log: Path, file: Path, deadline: float, progress: Callable[[], None]
) -> int | None:
    """Run a command; return its exit status, None if it ran out of time. Its process group is ended in any case."""
    with log.open("w") as output:
        process = subprocess.Popen(
            words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    size = -1
    try:
        while (left := deadline - time.monotonic()) > 0:
            now = file.stat().st_size if file.exists() else 0
            if now != size:
                progress()
            size = now
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, POLL_SECONDS))
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process group. A process that is stuck in the driver may stay: those behind it must not wait for it."""
    with contextlib.suppress(ProcessLookupError):
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            deadline = time.monotonic() + GRACE
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)  # raises if no process of the group is left
                time.sleep(0.02)


def _place(log: str) -> str:
    """Return where the main thread was when faulthandler wrote its stack into the log; "" if that is not there."""
    main_thread = log.rpartition("(most recent call first):")[2]
    places = re.findall(rf'File "{re.escape(str(ROOT))}/(\S+)", line (\d+)', main_thread)
    return f", in {places[0][0]}:{places[0][1]}" if places else ""
