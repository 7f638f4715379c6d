"""The GPU check with tasks that end well, hang, or die: `python -m tests.unit.benches.gpu_tasks PLATFORM SCENE ARGUMENTS`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.check import command, report
from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.parts import CheckPart, CheckTask

CODE = "tests.unit.benches.gpu_tasks"
# what a check of a minute may spend on a task is a tenth of its seconds, where all of them claim the 480 s of a full one
SCENES = {
    "rows": (
        CheckTask("measures", 100, ("a", "b")), CheckTask("measures and hangs", 200, ("c", "d")),
        CheckTask("never", 180, ("e",)),
    ),
    "faults": (
        CheckTask("hangs", 80, ("p", "q")), CheckTask("aborts", 130, ("r", "s")), CheckTask("raises", 100, ("t",)),
        CheckTask("ends before its turn", 30, ("u",)), CheckTask("measures", 140, ("a", "b")),
    ),
    "good": (CheckTask("measures", 480, ("a", "b")),),
}  # fmt: skip


def prepare(check: Check) -> str:
    """Write this process's id into a file that is named after the task, where the test wants that."""
    if check.task == "ends before its turn":
        sys.exit(7)
    if folder := os.environ.get("PREPARED"):
        Path(folder, check.task).write_text(f"{os.getpid()}.")
    return str(os.getpid())


def run(check: Check, prepared: str) -> None:
    """Run a task. The value of its first line is its process id."""
    assert prepared == str(os.getpid()) and check.left > 0
    first, *others = next(task.lines for tasks in SCENES.values() for task in tasks if task.name == check.task)
    check.report(first, "measured", str(os.getpid()))
    if check.task == "aborts":
        os.abort()
    if check.task == "raises":
        raise ValueError("broken")
    if "hangs" in check.task:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "3600"])
        check.report(first, "measured", f"{os.getpid()} {child.pid}")
        time.sleep(3600)
    for name in others:
        check.report(name, "passed", 0.0)


def main() -> int:
    """Run the check with the tasks of a scene in the place of its own."""
    platform, scene, *argv = sys.argv[1:]
    parts = (CheckPart("kernels", "Tasks of a test", SCENES[scene], code=CODE),)
    command.selected = lambda words: (platform, parts)  # type: ignore[assignment]
    command.LEAST_SECONDS = 0.0
    report.PARTS = parts
    return command.main(argv)


if __name__ == "__main__":
    sys.exit(main())
