"""The plugin that measures CPU seconds counts children that have ended, that still run, and that left the process tree."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.cpu_seconds import Meter

BURN = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\n"
DAEMON = f"import os\nif os.fork(): os._exit(0)\nos.setsid()\n{BURN}"


def ended() -> None:
    subprocess.run([sys.executable, "-S", "-c", BURN], check=True, stdout=subprocess.DEVNULL, timeout=60)


def still_running() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", BURN + "time.sleep(60)"], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    RUNNING.append(child)


def daemon() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", DAEMON], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()


RUNNING: list[subprocess.Popen[bytes]] = []


@pytest.mark.parametrize("burn", [ended, still_running, daemon])
def run_seconds_of_a_child_count(burn: Callable[[], None]) -> None:
    meter = Meter()
    try:
        if burn is daemon and not meter.counts_daemons:
            pytest.skip("needs a control group, which root can make")
        before = meter.seconds()
        burn()
        used = meter.seconds() - before
    finally:
        meter.close()
        while RUNNING:
            RUNNING[-1].kill()
            RUNNING.pop().wait(60)
    assert 0.35 <= used < 2.0  # /proc counts in hundredths


def test_waiting_costs_nothing() -> None:
    meter = Meter()
    try:
        before = meter.seconds()
        time.sleep(0.3)
        assert meter.seconds() - before < 0.1
    finally:
        meter.close()
