"""Run a server so that none of its processes outlives it, this guard or the owner.

    python -m tepo_megatron.rollout.servers.guard OWNER GRACE COMMAND...

An inference server is a tree of processes, and a death anywhere must not leave the rest behind, holding memory and ports:
  * OWNER (a pid, the parent) ends, by SIGKILL even: seen as a change of parent. PR_SET_PDEATHSIG set by the owner would not
    do: it fires when the *thread* that forked ends.
  * the server's first process is killed: vLLM's EngineCore would live on. The guard ends the whole session.
  * this guard is killed: the server gets SIGTERM from the kernel (the guard has one thread, so PDEATHSIG is right here).
COMMAND gets SIGTERM and GRACE seconds to end by itself, then its session gets SIGKILL. Exit status: that of COMMAND, 128 + n
if signal n ended it. Imports nothing heavy: it lives as long as the server and costs 10 MB.
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

from tepo_megatron.processes import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
OWNER_CHECK_SECONDS = 0.5
KILLED_SECONDS = 5.0  # for the kernel to take back what got SIGKILL

AT_ONCE = signal.SIGUSR1  # to the guard: the server is ill, and no grace would help. `nohup` has SIGHUP ignored
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, AT_ONCE, signal.SIGCHLD}


def main(owner: int, grace_seconds: float, command: list[str]) -> int:
    """Run `command` to its end, or end it when told to (SIGTERM, or AT_ONCE) or when the owner is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they are waited for instead
    # Orphans of the tree become ours, so that `_end` sees the last of them go.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=functools.partial(_before_exec, os.getpid())
    )
    while server.poll() is None and os.getppid() == owner:
        received = signal.sigtimedwait(_SIGNALS, OWNER_CHECK_SECONDS)
        if received is not None and received.si_signo == AT_ONCE:
            return _end(server, 0.0)
        if received is not None and received.si_signo != signal.SIGCHLD:
            break
    return _end(server, grace_seconds)


def _before_exec(guard: int) -> None:
    die_with_parent(guard, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _end(server: subprocess.Popen[bytes], grace_seconds: float) -> int:
    """End what is left of the server's session; returns when none of its processes exists any more."""
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(grace_seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    code = server.wait()
    deadline = time.monotonic() + KILLED_SECONDS
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
