"""Run whole runs under a fast clock, after its self-test: `python -m tests.fast_clock.clock SPEED ARGUMENTS OF PYTEST`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import lives

ROOT = Path(__file__).parents[2]
SPEED = "TEPO_TEST_SPEED"  # environment variable: how many times as fast the clock of whole runs is
SHIM, BUILT = Path(__file__).with_name("shim.c"), ROOT / "build" / "fast_clock" / "shim.so"
LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")


def variables(speed: float) -> dict[str, str]:
    """Return the environment variables under which a process and all that it starts have the fast clock."""
    return {"LD_PRELOAD": f"{BUILT}:{LIBRARY}", "FAKETIME": f"+0 x{speed:g}", "NO_FAKE_STAT": "1"}


def sweep() -> None:
    """Remove the shared memory of clocks whose first process was killed."""
    for path in Path("/dev/shm").glob("*faketime_s[eh]m_*"):
        if not lives(int(path.name.rpartition("_")[2])):
            path.unlink(missing_ok=True)


def main(speed: str, *arguments: str) -> int:
    """Return the exit status: of pytest, or 1 where there is no fast clock, or one that does not scale every wait."""
    if not LIBRARY.exists() or shutil.which("gcc") is None:
        print("make slow needs two packages (Debian: apt-get install faketime gcc libc6-dev)", file=sys.stderr)
        return 1
    BUILT.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", BUILT, SHIM, "-ldl", "-lpthread"], check=True)
    environment = os.environ | variables(float(speed)) | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    status = subprocess.run([sys.executable, "-m", "tests.fast_clock.waits", speed], cwd=ROOT, env=environment).returncode
    sweep()
    os.environ[SPEED] = speed
    return status or pytest.main(["-m", "fast_clock", *arguments])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
