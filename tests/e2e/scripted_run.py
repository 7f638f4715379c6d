"""`tepo train`, with ranks of `scripted_worker.py`."""

import functools
import sys

from tepo_megatron import cli
from tepo_megatron.launcher import launcher

if __name__ == "__main__":
    launcher.launch = functools.partial(launcher.launch, worker="tests.e2e.scripted_worker")
    sys.exit(cli.main())
