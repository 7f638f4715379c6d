"""Run `tepo` as `python -m tepo_megatron`."""

import sys

from tepo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
