"""`tepo train`, with ranks of `scripted_worker.py`; inside torchrun it is one of them, as `tepo train` is.

On a CPU no device is lost, so TEPO_TEST_WORKING names those that the launcher finds working after a failure.
"""

import functools
import os
import sys
from collections.abc import Sequence

from tepo_megatron import cli
from tepo_megatron.launcher import launcher


def find_working(devices: Sequence[str]) -> list[str]:
    return [name for name in devices if name in os.environ["TEPO_TEST_WORKING"].split(",")]


if __name__ == "__main__":
    if launcher.inside_torchrun():
        from tests.e2e.scripted_worker import ScriptedEngine

        launcher.run_rank = functools.partial(launcher.run_rank, make_engine=ScriptedEngine)
    found = {"find_working": find_working} if "TEPO_TEST_WORKING" in os.environ else {}
    launcher.launch = functools.partial(launcher.launch, worker="tests.e2e.scripted_worker", **found)
    sys.exit(cli.main())
