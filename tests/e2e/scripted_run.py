"""`tepo train`, with the service of `scripted_service.py`."""

import functools
import sys

from tepo_megatron.command import launcher, parsers

if __name__ == "__main__":
    launcher.launch = functools.partial(launcher.launch, service=("-m", "tests.e2e.scripted_service"))
    sys.exit(parsers.main())
