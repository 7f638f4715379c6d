"""Keeps one command and all that it starts, for a process that may be killed: `python keep.py LOG WORDS...`, by a file's path.

On stdin nothing is read: when it ends, because whoever holds the other end closed it or is gone, everything is ended. On stdout
comes the command's exit status, as one line, when none of its processes is left. In between nothing can get away: this process
adopts what its descendants leave behind (PR_SET_CHILD_SUBREAPER). It needs the standard library alone (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_SECONDS = 30.0  # between being told to end and being killed
_LOOK_SECONDS = 0.2
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def keep(log: str, words: list[str]) -> int:
    """Run a command until it ends, or stdin does; its exit status, as a shell counts. No process of it is left."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with open(log, "ab") as out:
        command = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=functools.partial(_prctl, _PR_SET_PDEATHSIG, signal.SIGTERM),
        )  # fmt: skip
    status: int | None = None
    wanted = True
    while wanted and status is None:
        wanted = not select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]
        status = _reap(command.pid)
    if status is None:
        os.kill(command.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while descendants := _descendants():
        found = _reap(command.pid)
        status = found if status is None else status
        if time.monotonic() > deadline:
            for pid in descendants:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    return 128 + signal.SIGKILL if status is None else status


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _reap(command: int) -> int | None:
    """Take note of all children that ended; the command's status if it is among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == command:
            code = os.waitstatus_to_exitcode(ended)
            status = code if code >= 0 else 128 - code


def _descendants() -> list[int]:
    """Of this process, those that ended and were not reaped included."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(path.parent.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def main() -> None:
    """Away from whoever started us, whose own end must not end us before we have ended the rest: Ray kills its children."""
    if os.fork():
        os._exit(0)
    os.setsid()
    status = keep(sys.argv[1], sys.argv[2:])
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        os.write(1, f"{status}\n".encode())


if __name__ == "__main__":
    main()
