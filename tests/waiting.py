"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

from tepo_megatron.utils.processes import read_stat


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"
