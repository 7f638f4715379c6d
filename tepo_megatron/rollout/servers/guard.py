"""Run a server so that none of its processes, and nothing in shared memory, outlives it, this guard or the owner.

    python -m tepo_megatron.rollout.servers.guard OWNER GRACE FOLDER COMMAND...

An inference server is a tree of processes, and a death anywhere must not leave the rest behind, holding memory and ports:
  * OWNER (a pid, the parent) ends, by SIGKILL even: seen as a change of parent. PR_SET_PDEATHSIG set by the owner would not
    do: it fires when the *thread* that forked ends.
  * the server's first process is killed: vLLM's EngineCore would live on. The guard ends the whole session.
  * this guard is killed: the server's first process gets SIGKILL from the kernel (the guard has one thread, so PDEATHSIG is
    right here; vLLM with open requests ignores SIGTERM), the others end themselves (`in_server/lifeline.py`), and the owner,
    where it lives, ends the session, which has the guard's pid as its number.
COMMAND gets SIGTERM and GRACE seconds to end by itself, then SIGKILL, with its session and with what left that session.
FOLDER: the server's `scratch.PrivateFolder`, in which the guard notes the server's segments of shared memory, and which it
removes when the owner cannot; "-": none. Exit status: that of COMMAND, 128 + n if signal n ended it. Imports nothing heavy: it
lives as long as the server and costs 10 MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tepo_megatron import scratch
from tepo_megatron.processes import die_with_parent, end_family, family, read_stat
from tepo_megatron.rollout.in_server.lifeline import GUARD_VARIABLE

PR_SET_CHILD_SUBREAPER = 36
OWNER_CHECK_SECONDS = 0.5
KILLED_SECONDS = 5.0  # for the kernel to take back what got SIGKILL
# Looking for shared memory takes some milliseconds: often while the server starts, seldom afterwards.
_SEGMENT_CHECKS = ((120.0, 2.0), (float("inf"), 30.0))  # (seconds since the start, seconds between two)

AT_ONCE = signal.SIGUSR1  # to the guard: the server is ill, and no grace would help. `nohup` has SIGHUP ignored
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, AT_ONCE, signal.SIGCHLD}


class Segments:
    """The segments of shared memory that processes of the server map, or mapped when they were last looked for."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._found: scratch.Segments = {}
        self._started = self._checked = time.monotonic()

    def note_if_due(self) -> None:
        """Look for them now and then, for whoever sweeps after all of us were killed."""
        now = time.monotonic()
        if now - self._checked > next(every for until, every in _SEGMENT_CHECKS if now - self._started < until):
            self.note()

    def note(self) -> None:
        """Look for them."""
        before = dict(self._found)
        self._found |= scratch.mapped_segments(process.pid for process in family(os.getpid()))
        if self._folder is not None and self._found != before:
            with contextlib.suppress(OSError):  # a full disk is no reason to end a server
                scratch.record_segments(self._folder, self._found)
        self._checked = time.monotonic()

    def remove(self) -> None:
        """When nothing of the server lives."""
        scratch.remove_segments(self._found)


def main(owner: int, grace_seconds: float, folder: Path | None, command: list[str]) -> int:
    """Run `command` to its end, or end it when told to (SIGTERM, or AT_ONCE) or when the owner is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they are waited for instead
    # Orphans of the tree become ours, so that `_end` sees the last of them go.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    me = read_stat(os.getpid())
    assert me is not None
    server = subprocess.Popen(
        command,
        env=os.environ | {GUARD_VARIABLE: f"{me.pid}:{me.started}"},
        stdin=subprocess.DEVNULL,
        process_group=0,  # in this session: the owner knows its number
        preexec_fn=functools.partial(_before_exec, me.pid),
    )
    segments = Segments(folder)
    while server.poll() is None and os.getppid() == owner:
        segments.note_if_due()
        received = signal.sigtimedwait(_SIGNALS, OWNER_CHECK_SECONDS)
        if received is not None and received.si_signo == AT_ONCE:
            grace_seconds = 0.0
            break
        if received is not None and received.si_signo != signal.SIGCHLD:
            break
    code = _end(server, grace_seconds, segments)
    if os.getppid() != owner and folder is not None:
        scratch.sweep(folder.parent, scratch.SHARED_MEMORY)
    return code


def _before_exec(guard: int) -> None:
    die_with_parent(guard)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _end(server: subprocess.Popen[bytes], grace_seconds: float, segments: Segments) -> int:
    """End what is left of the server; returns its exit status when none of its processes exists any more."""
    segments.note()
    if server.poll() is None and grace_seconds:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(grace_seconds)
    deadline = time.monotonic() + KILLED_SECONDS
    end_family(os.getpid(), KILLED_SECONDS)
    code = server.wait()
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)
    segments.remove()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), None if sys.argv[3] == "-" else Path(sys.argv[3]), sys.argv[4:]))
