"""Run a server so that none of its processes, and none of its shared memory, outlives it, this guard or the owner.

    python -m tepo_megatron.engines.servers.guard OWNER GRACE FOLDER COMMAND...

An inference server is a tree of processes. A death anywhere in it must not leave the rest behind, holding memory and ports:
  * OWNER (a pid, the parent) ends, even by SIGKILL: the guard sees a change of its parent. PR_SET_PDEATHSIG set by the owner
    would not do, because it fires when the *thread* that forked ends.
  * The server's first process is killed: vLLM's EngineCore would live on, so the guard ends the whole session.
  * The guard itself is killed: the server's first process gets SIGKILL from the kernel (the guard has one thread, so PDEATHSIG
    is right here; vLLM with open requests ignores SIGTERM). The other processes end themselves
    (`wire/receiver/lifeline.py`). The owner, if it lives, ends the session, whose id is the guard's pid.
COMMAND gets SIGTERM and GRACE seconds to end by itself. Then its session, and the processes that left that session, get
SIGKILL. FOLDER is the server's `scratch.PrivateFolder` ("-": none): the guard records the server's shared-memory segments in
it, and removes it when the owner cannot. Exit status: that of COMMAND, or 128 + n if signal n ended it. The guard imports
nothing heavy, because it lives as long as the server; it costs 10 MB.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tepo_megatron.base import scratch
from tepo_megatron.base.processes import die_with_parent, kill_process_tree, process_tree, read_stat, reap, wait_for_signal
from tepo_megatron.wire.receiver.lifeline import GUARD_VARIABLE

PR_SET_CHILD_SUBREAPER = 36
OWNER_CHECK_SECONDS = 0.5
# Limit since SIGKILL to a server's processes: hundreds of GiB take many seconds to free; then they are left to the kernel
KILLED_SECONDS = 30.0
# A check for shared memory takes some milliseconds. It is made while the list of all segments of the machine changes, for so
# long afterwards (a process maps a segment, and gives it its final name, after it has created it), and else seldom.
SETTLE_SECONDS = 3.0  # not a limit
CHECK_SECONDS = 30.0  # not a limit

AT_ONCE = signal.SIGUSR1  # to the guard: the server is ill, skip the grace period. Not SIGHUP, which `nohup` ignores
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, AT_ONCE, signal.SIGCHLD}


class SharedMemorySegments:
    """Shared-memory segments that processes of the server map, or mapped at an earlier check."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._found = {} if folder is None else scratch.recorded_segments(folder)
        self._listed: list[str] = []
        self._changed = self._checked = time.monotonic()

    def note_if_due(self) -> None:
        """Check for segments if the machine's list of segments changed lately, or if the last check is long ago."""
        now, listed = time.monotonic(), scratch.list_segments()
        if listed != self._listed:
            self._listed, self._changed = listed, now
        if now - self._changed < SETTLE_SECONDS or now - self._checked > CHECK_SECONDS:
            self.note()

    def note(self) -> None:
        """Check for segments now, and record new ones in the folder."""
        before = dict(self._found)
        self._found |= scratch.mapped_segments(process.pid for process in process_tree(os.getpid()))
        if self._folder is not None and self._found != before:
            with contextlib.suppress(OSError):  # a full disk is no reason to end a server
                scratch.record_segments(self._folder, self._found)
        self._checked = time.monotonic()

    def remove(self) -> None:
        """Remove all known segments. Call this when no process of the server is alive."""
        scratch.remove_segments(self._found)


def main(owner: int, grace_seconds: float, folder: Path | None, command: list[str]) -> int:
    """Run `command` until it ends, a signal asks to end it (SIGTERM, SIGINT, SIGHUP or AT_ONCE), or the owner is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # `wait_for_signal` receives them instead
    # Orphans of the tree become children of the guard, so that `_end` can wait for the last of them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    me = read_stat(os.getpid())
    assert me is not None
    server = subprocess.Popen(
        command,
        env=os.environ | {GUARD_VARIABLE: f"{me.pid}:{me.started}"},
        stdin=subprocess.DEVNULL,
        process_group=0,  # in the guard's session: the owner knows the session id
        preexec_fn=functools.partial(_before_exec, me.pid),
    )
    segments = SharedMemorySegments(folder)
    while server.poll() is None and os.getppid() == owner:
        segments.note_if_due()
        received = wait_for_signal(_SIGNALS, OWNER_CHECK_SECONDS)
        if received not in (None, signal.SIGCHLD):
            grace_seconds = 0.0 if received == AT_ONCE else grace_seconds
            break
    code = _end(server, grace_seconds, segments)
    if os.getppid() != owner and folder is not None:
        scratch.sweep(folder.parent, scratch.SHARED_MEMORY)
    return code


def _before_exec(guard: int) -> None:
    die_with_parent(guard)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _end(server: subprocess.Popen[bytes], grace_seconds: float, segments: SharedMemorySegments) -> int:
    """End what is left of the server. Returns its exit status when none of its processes exists any more."""
    segments.note()
    if server.poll() is None and grace_seconds:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(grace_seconds)
    deadline = time.monotonic() + KILLED_SECONDS
    kill_process_tree(os.getpid(), KILLED_SECONDS)
    code = reap(server)
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)
    segments.remove()
    return 128 + signal.SIGKILL if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), None if sys.argv[3] == "-" else Path(sys.argv[3]), sys.argv[4:]))
