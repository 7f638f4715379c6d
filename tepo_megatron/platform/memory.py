"""Freed memory stays with the process until it is given back; how much a process has."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

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


def give_back(device: torch.device) -> None:
    """Give what was freed, and is kept for the next tensor, back to the device: here to the system, for other processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(frozen=True)
class Usage:
    """Memory of this process, in bytes.

    held: what nobody else can use (cuda: what PyTorch has reserved; cpu: the resident set); peak: of `held`, since
    `reset_peak`; used: by tensors (cuda only); device: in use on the GPU, by any process (cuda only).
    """

    held: int
    peak: int
    used: int | None = None
    device: int | None = None


def usage(device: torch.device) -> Usage:
    """Now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Usage(
            held=torch.cuda.memory_reserved(device),
            peak=torch.cuda.max_memory_reserved(device),
            used=torch.cuda.memory_allocated(device),
            device=total - free,
        )
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, peak = (int(status[key].split()[0]) * 2**10 for key in ("VmRSS", "VmHWM"))
    return Usage(held=resident, peak=peak)


def reset_peak(device: torch.device) -> None:
    """Count the peak from now on; a kernel that does not let a process do that goes on with its own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5)
