"""Freed memory stays with the process."""

from __future__ import annotations

import ctypes

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """glibc gives the pages of large tensors back with each `free`, and the kernel zeroes new ones for the next tensor.

    The resident set stays at its peak instead. On another C library: nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)  # all from the heap
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)  # which does not shrink
