"""Run one part in a subprocess: python -m benchmarks.gpu.check.part NAME PLATFORM FOLDER FILE SECONDS."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.check.lines import Check


def main() -> None:
    """Run the part's code; lines that failed do not change the exit status."""
    from tepo_megatron.utils.processes import die_with_parent

    die_with_parent(os.getppid(), signal.SIGKILL)  # also if the command is killed
    name, platform, folder, file, seconds = sys.argv[1:]
    check: Any = Check(platform, Path(folder), Path(file), time.monotonic() + float(seconds))  # type: ignore[arg-type]
    importlib.import_module(f"benchmarks.gpu.check.run_{name}").run(check)


if __name__ == "__main__":
    main()
