"""`tepo train`, with ranks of `scripted_worker.py`; inside torchrun it is one of them, as `tepo train` is."""

import functools
import sys

from tepo_megatron import cli
from tepo_megatron.launcher import launcher

if __name__ == "__main__":
    if launcher.inside_torchrun():
        from tests.e2e.scripted_worker import ScriptedEngine

        launcher.run_rank = functools.partial(launcher.run_rank, make_engine=ScriptedEngine)
    launcher.launch = functools.partial(launcher.launch, worker="tests.e2e.scripted_worker")
    sys.exit(cli.main())
