"""Processes that never outlive the one that needs them, or their time (Linux).

Imports nothing heavy: workers and guards start with it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signum: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send `signum` to this process when the thread that started it ends, however it ends.

    parent_pid: who started it, by its own account: if that process is gone already, or was gone when this one first looked, it
    ends here, with status 1. Fit for a preexec_fn. Raises OSError.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def end_later(pid: int, seconds: float) -> None:
    """SIGKILL for a process that lives longer than so many seconds from now, sent by a process of its own: ours may be gone."""
    subprocess.Popen(
        [sys.executable, "-m", __spec__.name, str(pid), str(seconds)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _main(pid: int, seconds: float) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if not select.select([process], [], [], seconds)[0]:  # readable once it has ended
        signal.pidfd_send_signal(process, signal.SIGKILL)


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]))
