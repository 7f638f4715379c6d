"""The plugin that measures CPU seconds counts children that have ended, that still run, and that left the process tree."""

from __future__ import annotations

import subprocess
import sys

import pytest

BURN = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\n"
BURNS = {
    "ended": BURN,
    "still-running": BURN + "time.sleep(60)",
    "daemon": f"import os\nif os.fork(): os._exit(0)\nos.setsid()\n{BURN}",
}
# in a process of its own, because threads and processes of other tests would count too
MEASURE = """
import subprocess, sys, time
from tests.cpu_seconds import Meter

meter = Meter()
try:
    if sys.argv[1] == "daemon" and not meter.counts_daemons:
        sys.exit("needs a control group, which root can make")
    before = meter.seconds()
    with subprocess.Popen([sys.executable, "-S", "-c", sys.argv[2]], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        time.sleep(1.0)  # costs nothing
        print(meter.seconds() - before)
        child.kill()
finally:
    meter.close()
"""


@pytest.mark.parametrize("name", BURNS)
def test_seconds_of_a_child_count_and_waiting_does_not(name: str) -> None:
    words = [sys.executable, "-c", MEASURE, name, BURNS[name]]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "control group" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert 0.35 <= float(done.stdout) < 1.0  # /proc counts in hundredths
