"""The `tepo` command.

parsers.py     the words of each command, and how errors become one message
commands.py    what each command does
"""

from tepo_megatron.cli.parsers import main

__all__ = ["main"]
