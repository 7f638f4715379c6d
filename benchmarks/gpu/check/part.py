"""Run one task in a process of its own: python -m benchmarks.gpu.check.part MODULE IMPORTS TASK PLATFORM FOLDER FILE READY.

It imports everything before its turn, without touching the GPU, and writes the time when it is ready. Its deadline, on the
monotonic clock, comes as a line on the standard input.
"""

import contextlib
import faulthandler
import importlib
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.check.lines import Check

RANKS_SECONDS, OWN_SECONDS = 3.0, 1.0  # before the deadline: the stacks of the ranks, and of this process, go into the log


class DeadlineThread(threading.Thread):
    """Waits for the deadline, also while the main thread imports, and shows all stacks before it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._known, self._deadline = threading.Event(), math.inf

    def wait(self) -> float:
        """Return the deadline when the task may run."""
        self._known.wait()
        return self._deadline

    def run(self) -> None:
        line = os.read(0, 100)  # sys.stdin has a lock that the end of the interpreter would wait for
        if not line:
            os._exit(1)  # the check has ended
        self._deadline = float(line)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.dump_traceback_later(max(0.1, self._deadline - time.monotonic() - OWN_SECONDS))
        self._known.set()
        time.sleep(max(0.0, self._deadline - time.monotonic() - RANKS_SECONDS))
        if ranks := sys.modules.get("benchmarks._ranks"):
            ranks.show_stacks()


def main() -> None:
    """Run the task's code; lines that failed do not change the exit status."""
    module, imports, task, platform, folder, file, ready = sys.argv[1:]
    turn = DeadlineThread()
    turn.start()
    check: Any = Check(platform, task, Path(folder), Path(file), math.inf)  # type: ignore[arg-type]
    code = importlib.import_module(module)
    if imports and platform == "cpu":
        importlib.import_module("tepo_megatron.dist.platform").activate(platform)  # before Megatron-Core is imported
    for name in filter(None, imports.split(",")):
        with contextlib.suppress(ImportError):  # the task says what it lacks
            importlib.import_module(name)
    prepared = [code.prepare(check)] if hasattr(code, "prepare") else []
    Path(ready).write_text(str(time.monotonic()))
    check.deadline = turn.wait()
    code.run(check, *prepared)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
