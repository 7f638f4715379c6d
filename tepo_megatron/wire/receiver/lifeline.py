"""End a process of an inference server when the guard of that server has ended.

Every process of the server calls `hold`. While the guard lives, it ends the whole server when any part of it dies
(`engines/servers/guard.py`). When the guard itself is killed, nobody else may be left to do that: an engine process whose API
server and trainer were killed at the same moment would live on. This file imports nothing heavy, because it runs inside the
engines.
"""

import os
import signal
import threading
from pathlib import Path
from typing import NoReturn

from tepo_megatron.base.processes import wait_for_end

GUARD_VARIABLE = "TEPO_SERVER_GUARD"  # PID:START; START in clock ticks after boot, as in /proc/PID/stat


def hold() -> None:
    """Have this process, and those that it forks, get SIGKILL when the guard ends, or at once if it has ended already.

    Does nothing without a guard (an engine that somebody else started), or if it was called before.
    """
    global _held
    if _held or GUARD_VARIABLE not in os.environ:
        return
    _held = True
    os.register_at_fork(after_in_child=_watch)
    _watch()


_held = False


def _watch() -> None:
    pid, _, started = os.environ[GUARD_VARIABLE].partition(":")
    try:
        guard = os.pidfd_open(int(pid))
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        _end()
    if stat[stat.rindex(")") + 2 :].split()[19] != started:  # the pid belongs to another process by now
        _end()
    threading.Thread(target=_end_with, args=(guard,), name="tepo-lifeline", daemon=True).start()


def _end_with(guard: int) -> None:
    wait_for_end(guard)
    _end()


def _end() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive after SIGKILL")
