"""Check a machine with one GPU: `python tools/gpu_check.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the project need not be installed

from benchmarks.gpu.check.command import main

if __name__ == "__main__":
    sys.exit(main())
