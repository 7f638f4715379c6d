"""Run one task in a process of its own: python -m benchmarks.gpu.check.part MODULE UNIT PLATFORM FOLDER FILE DEADLINE."""

from __future__ import annotations

import faulthandler
import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.check.lines import Check


def main() -> None:
    """Run the task's code; lines that failed do not change the exit status."""
    module, task, platform, folder, file, deadline = sys.argv[1:]
    check: Any = Check(platform, task, Path(folder), Path(file), float(deadline))  # type: ignore[arg-type]
    faulthandler.dump_traceback_later(max(0.1, check.left - 1))  # so that the log says where the task was when it was cut off
    importlib.import_module(module).run(check)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
