"""Waiting for what other processes do."""

import threading
import time
from collections.abc import Callable

from tepo_megatron.base.processes import read_stat


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def error_of(call: Callable[[], object], seconds: float) -> str | None:
    """Return the text of the error with which a call ends; None if it ends without one, or not within the seconds."""
    errors: list[str] = []

    def run() -> None:
        try:
            call()
        except Exception as e:
            errors.append(str(e))

    calling = threading.Thread(target=run, daemon=True)
    calling.start()
    calling.join(seconds)
    return errors[0] if errors else None


def lives(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"
