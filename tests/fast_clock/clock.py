"""The fast clock: what it needs, its variables, and its self-test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.waiting import lives

ROOT = Path(__file__).parents[2]
SPEED = "TEPO_TEST_SPEED"  # variable with how many times as fast the clock of whole runs is
SHIM, BUILT = Path(__file__).with_name("shim.c"), ROOT / "build" / "fast_clock" / "shim.so"
LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")


def lacking() -> str:
    """Return what this machine lacks, and how to install it; empty if it has all."""
    has = {"faketime": LIBRARY.exists(), "gcc": shutil.which("gcc") is not None}
    packages = {"faketime": "faketime", "gcc": "gcc libc6-dev"}
    words = " ".join(packages[name] for name, found in has.items() if not found)
    return words and f"the fast clock is not there; install it: apt-get install {words}"


def build() -> None:
    BUILT.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", BUILT, SHIM, "-ldl", "-lpthread"], check=True)


def variables(speed: float) -> dict[str, str]:
    """Return the environment variables under which a process and all that it starts have the fast clock."""
    return {"LD_PRELOAD": f"{BUILT}:{LIBRARY}", "FAKETIME": f"+0 x{speed:g}", "NO_FAKE_STAT": "1"}


def self_test(speed: float) -> bool:
    """Return whether all waits are scaled; print those that are not."""
    words = [sys.executable, "-m", "tests.fast_clock.waits", str(speed)]
    environment = os.environ | variables(speed) | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    status = subprocess.run(words, cwd=ROOT, env=environment).returncode
    sweep()
    return status == 0


def sweep() -> None:
    """Remove the shared memory of clocks whose first process was killed."""
    for path in Path("/dev/shm").glob("*faketime_s[eh]m_*"):
        if not lives(int(path.name.rpartition("_")[2])):
            path.unlink(missing_ok=True)
