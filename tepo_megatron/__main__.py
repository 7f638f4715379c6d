"""Run `tepo` as `python -m tepo_megatron`."""

import sys

from tepo_megatron.command.parsers import main

if __name__ == "__main__":
    sys.exit(main())
