"""The process group of one task: started ahead of its turn, read while it runs, and ended with everything that it started."""

import contextlib
import functools
import importlib.util
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
from tepo_megatron.base.processes import die_with_parent

GRACE = 3.0  # seconds between SIGTERM and SIGKILL, in which launchers end their ranks, and after SIGKILL
POLL_SECONDS = 0.1  # between two looks at a task's lines
STACKS = re.compile(r"^(?:stacks of (rank \d+)|Timeout) [^\n]*\n(.*?)(?=^stacks of rank|^Timeout|\Z)", re.MULTILINE | re.DOTALL)
SHOWN_LINES, KEPT_CHARACTERS = {"failed": 30, "cut off": 300}, {"failed": 4000, "cut off": 20_000}  # of a task's log


def environment(platform: str) -> dict[str, str]:
    """Return the environment of a task: the project from its folder, no network, few threads because of the many ranks."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if platform == "cpu" else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    tests = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the machine's image may have plugins that take seconds
    added = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **offline, **threads, **hidden, **tests, **_bytecode()}
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | added


def _bytecode() -> dict[str, str]:
    """Return where compiled modules are kept if torch is installed without them: compiling them takes most of an import."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.cached is None or Path(torch.cached).exists():
        return {}
    return {"PYTHONPYCACHEPREFIX": str(ROOT / "build/pycache")}


class TaskProcess:
    """The process of a task. It imports what it needs and waits for `run`."""

    def __init__(self, part: CheckPart, task: CheckTask, platform: str, folder: Path) -> None:
        """Start it."""
        name = re.sub(r"\W", "-", f"{part.name}-{task.name}")
        self._task = task
        self._file, self._log, self._ready = (folder / f"{name}.{kind}" for kind in ("jsonl", "log", "ready"))
        self._start = time.monotonic()
        words = ["-m", "benchmarks.gpu.check.part", part.module, ",".join(part.imports), task.name, platform, str(folder)]
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *words, str(self._file), str(self._ready)], cwd=ROOT, env=environment(platform),
                stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, bufsize=0,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )  # fmt: skip

    def run(self, seconds: float, keep: Callable[[TaskResult], None]) -> TaskResult:
        """Let the task run, end its process group, and return the result."""
        start = time.monotonic()
        status = self._ended(start + seconds, keep)
        end, reported = time.monotonic(), lines.read(self._file)
        ready = self._ready.read_text() if self._ready.exists() else ""
        preloading = round(float(ready) - self._start, 1) if ready else None
        more: dict[str, Any] = {
            "seconds": round(end - start, 1), "limit": round(seconds, 1), "preloading": preloading, "exit_status": status,
        }  # fmt: skip
        outcome = status_of(reported)
        if status == 0 and outcome != "failed":
            return TaskResult(self._task, outcome, reported, "", more)
        outcome = "cut off" if status is None else "failed"
        log = self._log.read_text(errors="replace")
        tail = "\n".join(log.splitlines()[-SHOWN_LINES[outcome] :])
        print(tail, file=sys.stderr, flush=True)
        more["log"] = without_folders(tail)[-KEPT_CHARACTERS[outcome] :]
        if status == 0:
            return TaskResult(self._task, outcome, reported, "", more)
        if status is None:
            return TaskResult(self._task, outcome, reported, f"cut off after {seconds:.0f} s{places(log)}", more)
        how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
        return TaskResult(self._task, outcome, reported, f"ended with {how}: {last_line(tail)}", more)

    def end(self) -> None:
        """End the process group. A process that is stuck in the driver may stay: those behind it must not wait for it."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:  # it has ended; another group may have its number
            return
        self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            for number in (signal.SIGTERM, signal.SIGKILL):
                os.killpg(self._process.pid, number)
                deadline = time.monotonic() + GRACE
                while time.monotonic() < deadline:
                    self._process.poll()
                    os.killpg(self._process.pid, 0)  # raises if no process of the group is left
                    time.sleep(0.02)

    def _ended(self, deadline: float, keep: Callable[[TaskResult], None]) -> int | None:
        """Tell the process its deadline; return its exit status, None if it ran out of time."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died before its turn
            self._process.stdin.write(f"{deadline}\n".encode())
        size = -1
        try:
            while (left := deadline - time.monotonic()) > 0:
                now = self._file.stat().st_size if self._file.exists() else 0
                if now != size:
                    keep(TaskResult(self._task, "running", lines.read(self._file), "not done yet", {}))
                size = now
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self._process.wait(min(left, POLL_SECONDS))
            return None
        finally:
            self.end()


def without_folders(log: str) -> str:
    """Return a log without this machine's folders: paths begin at the checkout, or at an installed package."""
    installed = [re.escape(f"{folder}/") for folder in sorted({str(ROOT), *filter(None, sys.path)}, key=len, reverse=True)]
    return re.sub("|".join(installed), "", log)


def places(log: str) -> str:
    """Return where the main threads were when their stacks were written into the log; "" if they are not there."""
    found = []
    for name, stacks in STACKS.findall(log):
        main_thread = stacks.rpartition("(most recent call first):")[2]
        here = re.findall(rf'File "{re.escape(str(ROOT))}/((?!\S*site-packages/)\S+)", line (\d+)', main_thread)
        found += [f"{name or 'the task'} in {here[0][0]}:{here[0][1]}"] if here else []
    return "".join(f", {place}" for place in found)
