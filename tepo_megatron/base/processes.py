"""Process control that lets no process outlive its owner or its time limit (Linux).

This module imports nothing heavy, because workers and guards start with it.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCHER = "TEPO_LAUNCHER_PID"  # environment variable with the launcher's process ID, for the ranks that it starts
RANK_THREADS = "TEPO_RANK_THREADS"  # environment variable that is set where the launcher, not the user, set OMP_NUM_THREADS
ATTEMPT = "TEPO_ATTEMPT"  # environment variable with the number of restarts
START_ID = "TEPO_START_ID"  # environment variable with the name of this start of a run on several machines
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)
_POLL_SECONDS = 0.02
KILLED_SECONDS = 60.0  # limit since SIGKILL: the kernel frees a process's memory in seconds; then a warning names the process


@dataclass(frozen=True)
class ProcessStat:
    """One line of /proc/PID/stat."""

    pid: int
    state: str  # Z: the process has ended, and its parent has not read its status yet
    parent: int
    group: int
    session: int
    started: int  # start time in clock ticks after boot, which tells successive owners of one pid apart


def die_with_parent(parent_pid: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to this process when the thread that started it ends, however it ends.

    SIGKILL, the default, also ends a process that is stopped or ignores SIGTERM. This function can be a preexec_fn. Raises
    OSError if prctl failed.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain any character
    return ProcessStat(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def process_tree(leader: int) -> list[ProcessStat]:
    """Return the live processes of the session that `leader` leads or led, and all their descendants, without `leader`."""
    processes = [stat for name in os.listdir("/proc") if name.isdigit() and (stat := read_stat(int(name))) is not None]
    tree, parents = {leader}, {leader}
    tree |= {process.pid for process in processes if process.session == leader}
    while parents:
        parents = {process.pid for process in processes if process.parent in tree and process.pid not in tree}
        tree |= parents
    return [process for process in processes if process.pid in tree - {leader} and process.state not in "ZX"]


def has_ended(child: int) -> bool:
    """Return whether a child of this process has ended. The child is not reaped, so its pid is not reused."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it was already reaped
        return True


def kill_process_tree(leader: int, seconds: float) -> bool:
    """Send SIGKILL to `process_tree(leader)` until none is left, because they may start others in the meantime."""
    deadline = time.monotonic() + seconds
    while processes := process_tree(leader):
        if time.monotonic() > deadline:
            return False
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return True


def wait_for_end(pidfd: int) -> None:
    """Wait until a process has ended, however long it lives. Call it in a thread that nobody waits for."""
    select.select([pidfd], [], [])


def reap(process: "subprocess.Popen[Any]", seconds: float = KILLED_SECONDS) -> int | None:
    """Return the exit status of a process that has ended or was killed. A warning and None: the kernel did not end it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    import logging  # which most workers and guards never need

    stuck = "pid %d was killed and has not ended in %g s: it waits for a device or a file system"
    logging.getLogger(__name__).warning(stuck, process.pid, seconds)
    return None


def wait_for_signal(blocked: set[signal.Signals], seconds: float) -> int | None:
    """Return the blocked signal that comes within `seconds`. A process that is stopped meanwhile has received none.

    CPython 3.11 returns uninitialised memory when the time passes during the stop.
    """
    received = signal.sigtimedwait(blocked, seconds)
    return received.si_signo if received is not None and received.si_signo in blocked else None


@contextlib.contextmanager
def handlers_restored(numbers: Iterable[signal.Signals]) -> Iterator[dict[signal.Signals, Any]]:
    """Yield the present handlers of these signals, and restore them in the end."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
