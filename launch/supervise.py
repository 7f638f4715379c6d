"""Supervise one command and all its descendants for a process that may be killed: `python supervise.py LOG WORDS...`.

Run it by its file path. Stdin is never read. When stdin is closed, because the process at the other end closed it or has ended,
all processes of the command are ended. When none is left, one line with the command's exit status is written to stdout. No
descendant can escape, because this process adopts orphans (PR_SET_CHILD_SUBREAPER). Only the standard library is needed
(Linux).
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

GRACE_SECONDS = 30.0  # between SIGTERM and SIGKILL
_LOOK_SECONDS = 0.2
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def supervise(log: str, words: list[str]) -> int:
    """Run a command until it ends or stdin is closed. No process of it is left afterwards.

    Returns:
        The exit status, as a shell counts it.
    """
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
    """Reap all children that ended. Return the command's status if it is among them, else None."""
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
    """Return the descendants of this process, including those that ended and were not reaped."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has already ended
        children.setdefault(parent, []).append(int(path.parent.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def main() -> None:
    """Detach from the parent, then supervise.

    Ray kills the children of an ending process; detached, this process can still end all the others.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    status = supervise(sys.argv[1], sys.argv[2:])
    with contextlib.suppress(BrokenPipeError):  # nobody waits for the status
        os.write(1, f"{status}\n".encode())


if __name__ == "__main__":
    main()
