"""Processes that never outlive the one that needs them (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send `signum` to this process when the thread that started it ends, however it ends.

    Fit for a preexec_fn. If the parent is gone already, the process ends here.
    """
    parent = os.getppid()
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
