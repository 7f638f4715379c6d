"""The command: run the tasks of all parts in order of value, each in a process group with a time limit of its own.

Only one task runs at a time. The processes of the next ones start meanwhile: their imports take longer than most tasks.
The results are written before the first task starts and whenever a line is known: this process may be ended at any time.
"""

import argparse
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import machine
from benchmarks.gpu.check.parts import CPU, LEAST_SECONDS, PARTS, CheckPart, limit, seconds_of, selected
from benchmarks.gpu.check.report import (
    TIMELINE,
    Result,
    TaskResult,
    draw_timeline,
    load,
    merged,
    outcome_line,
    result_of,
    save,
    traces,
)
from benchmarks.gpu.check.task_process import TaskProcess, environment
from benchmarks.results import ROOT, surroundings
from tepo_megatron.base.processes import die_with_parent

FILE, PAGE = ROOT / "benchmarks/results/gpu/check.json", ROOT / "docs/gpu.md"
TORCH_SECONDS = 60.0  # for torch to say whether it finds a GPU
AHEAD = max(1, min(3, (os.cpu_count() or 1) // 4))  # processes that start while a task runs; some start ranks too
DESCRIPTION = """Check a machine with one GPU, offline, without installing the project: kernels, training steps, steps of a
real size, transfers of weights, offloading, several ranks on the one GPU, tests, engines. What cannot run here is skipped, with
the reason. Results: a JSON file and a page. Exit status: 0 if something ran and all that can run here passed, else 1; so it is
1 where there is no GPU, a package is missing, or `tepo plan` does not know the GPU, which is said at once."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument(
        "--parts", help=f"comma-separated: {names}; `{CPU}`: a rehearsal on the CPU, at tiny sizes (default: all, on the GPU)"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of the whole check (default: %(default)g)")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"folder of gpu.json, gpu.md (default: {FILE.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}; CPU: build/gpu_check)",
    )
    return parser.parse_args(argv)


class Table:
    """The results of a check, on disk at any time. An earlier check's stay in the file until a part has run again."""

    def __init__(self, file: Path, page: Path, parts: Sequence[CheckPart]) -> None:
        self.file, self.page, self._earlier = file, page, load(file)
        self.set_machine("")
        self._tasks = {
            part: {task: TaskResult(task, "waiting", [], "not run yet", {}) for task in part.tasks} for part in parts
        }

    def set_machine(self, device: str) -> None:
        """Name the device of all results, with the rest of the machine."""
        day = datetime.now(UTC).date().isoformat()
        self._at: dict[str, Any] = {"device": device, "date": day, **surroundings()}

    def put(self, part: CheckPart, result: TaskResult) -> None:
        """Write what is known, with a task's result so far."""
        self._tasks[part][result.task] = result
        self.write()

    def refuse(self, why: str) -> None:
        """Skip every task for the same reason, and write."""
        for tasks in self._tasks.values():
            tasks.update({task: TaskResult(task, "skipped", [], why, {}) for task in tasks})
        self.write()

    def result(self, part: CheckPart) -> Result:
        """Return what is known of a part."""
        return result_of(part, list(self._tasks[part].values()), **self._at)

    def write(self) -> None:
        """Write what is known."""
        save(self.file, self.page, merged(self._earlier, [self.result(part) for part in self._tasks]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; return the exit status."""
    args = arguments(argv)
    deadline = time.monotonic() + seconds_of(args.minutes)
    try:
        platform, parts = selected(args.parts)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    out = args.out or (ROOT / "build/gpu_check" if platform == "cpu" else None)
    table = Table(FILE, PAGE, parts) if out is None else Table(out / "gpu.json", out / "gpu.md", parts)
    table.write()  # torch may take a minute to say whether there is a GPU
    device, refusal = _device(platform)
    table.set_machine(device)
    unknown = platform == "cuda" and machine.unknown_card(device)
    if refusal:
        table.refuse(refusal)
        print(f"{refusal}\nwritten: {table.file} and {table.page}", file=sys.stderr)
        return 1
    table.write()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        _run_all(table, parts, platform, Path(folder), args.minutes, deadline)
    if found := traces(load(table.file)):
        draw_timeline(found, table.page.with_name(TIMELINE))
    print(f"written: {table.file} and {table.page}")
    statuses = {table.result(part)["status"] for part in parts}
    return 0 if "passed" in statuses and statuses <= {"passed", "skipped"} and not unknown else 1


def _run_all(table: Table, parts: Sequence[CheckPart], platform: str, folder: Path, minutes: float, deadline: float) -> None:
    """Run the tasks one after the other."""
    runs = [(part, task) for part in parts for task in part.tasks if part.cpu or platform == "cuda"]
    for part in parts:
        if not part.cpu and platform == "cpu":
            for task in part.tasks:
                table.put(part, TaskResult(task, "skipped", [], "needs a GPU", {}))
            print(outcome_line(table.result(part)), flush=True)
    with contextlib.ExitStack() as stack:
        processes: list[TaskProcess] = []
        for number, (part, task) in enumerate(runs):
            for next_part, next_task in runs[len(processes) : number + AHEAD + 1]:
                processes.append(TaskProcess(next_part, next_task, platform, folder))
                stack.callback(processes[-1].end)
            later = runs[number + 1 :]
            seconds = limit(task, [task for _, task in later], minutes, deadline - time.monotonic())
            if seconds < LEAST_SECONDS:
                processes[number].end()
                table.put(part, TaskResult(task, "no time left", [], "no time was left; raise --minutes", {}))
            else:
                keep = functools.partial(table.put, part)
                keep(processes[number].run(seconds, keep))
            if not any(other is part for other, _ in later):
                print(outcome_line(table.result(part)), flush=True)


def _device(platform: str) -> tuple[str, str]:
    """Return the name of the device, and why nothing can run here; "" if it can. What is known at once is said at once."""
    if missing := machine.missing_packages(platform):
        return "", missing
    if platform == "cpu":
        print("on the CPU, at tiny sizes: this tests the check, and says nothing about a GPU", flush=True)
        return "CPU", ""
    seen, none = machine.driver_gpu()
    print(f"{none}; asking torch" if none else f"GPU: {seen}", file=sys.stderr if none else sys.stdout, flush=True)
    if seen and (unknown := machine.unknown_card(seen)):
        print(unknown, file=sys.stderr, flush=True)
    code = "import torch; print(torch.__version__); print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    words = [sys.executable, "-c", code]  # in a process of its own, because a CUDA context takes memory
    try:
        done = subprocess.run(
            words, env=environment(platform), capture_output=True, text=True, timeout=TORCH_SECONDS, check=False,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"torch did not say in {TORCH_SECONDS:.0f} s whether it finds a GPU"
    if done.returncode:
        return "", f"torch cannot be used: {machine.last_line(done.stderr)}"
    version, name = done.stdout.splitlines()[-2:]
    if name and not seen and (unknown := machine.unknown_card(name)):
        print(unknown, file=sys.stderr, flush=True)
    return name, "" if name else f"needs a GPU, and torch {version} finds none"
