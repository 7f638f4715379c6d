"""Process control that lets no process outlive its owner or its time limit (Linux), and the settings of a process.

These are the limit on open files, the proxy that clients of servers on this machine must not use, and the warnings of other
packages. This module imports nothing heavy, because workers and guards start with it.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
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


WANTED = 65_536  # as vLLM and SGLang ask for; programs that close all possible files are slow under much higher limits
SPARE_FILES = 64  # for whatever else a process opens while requests are in flight


def open_file_limit() -> int:
    """Return the soft limit; sys.maxsize if there is none."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_open_file_limit(wanted: int = WANTED) -> int:
    """Raise the soft limit to `wanted`, or to the hard limit if that is lower. Children of this process inherit it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if open_file_limit() < (possible := min(_number(hard), wanted)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    return open_file_limit()


def _number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


_VARIABLES = "NO_PROXY", "no_proxy"  # clients differ in which one they prefer
_HOSTS = "127.0.0.1", "localhost", "::1"


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which clients reach the loopback interface directly."""
    exempt = [host.strip() for name in _VARIABLES for host in environment.get(name, "").split(",") if host.strip()]
    hosts = ["*"] if "*" in exempt else dict.fromkeys([*exempt, *_HOSTS])  # clients know "*" only if it is alone
    return dict.fromkeys(_VARIABLES, ",".join(hosts))


def quiet_upstream() -> None:
    """Silence these warnings in this process."""
    for category, message in (
        # Megatron-Core calls collectives by names that torch 2.13 deprecated
        (FutureWarning, r"`torch\.distributed\.\w+` is deprecated"),
        # Megatron-Core reads .grad of the distributed optimizer's shards, which are views
        (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf"),
        # Megatron-Core warns of its own default for CUDA graphs, which are off
        (UserWarning, r"full scope is deprecated"),
        # Megatron-Core compares the CPU and CUDA generator states, which are the same on the CPU
        (UserWarning, r"CPU RNG state changed within GPU RNG context"),
        # matplotlib draws a box for a letter of the run's name that its font lacks
        (UserWarning, r"Glyph \d+ .* missing from font"),
    ):
        warnings.filterwarnings("ignore", message=message, category=category)
