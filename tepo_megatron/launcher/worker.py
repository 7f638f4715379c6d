"""The module that `tepo train` starts once per rank: `python -m tepo_megatron.launcher.worker runs/NAME/config.yaml`."""

import sys

from tepo_megatron.config.io import load_config
from tepo_megatron.launcher.launcher import run_rank

if __name__ == "__main__":
    sys.exit(run_rank(load_config(sys.argv[1])))
