"""Keep freed memory in the process, return it to the device, and report how much memory the process has."""

import contextlib
import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

# from malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Make glibc keep freed memory. On another C library, do nothing.

    By default glibc returns the pages of large tensors with each `free`, and the kernel zeroes new ones for the next tensor.
    With this setting the resident set stays at its peak.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_MAX, 0)  # allocate everything on the heap
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)  # the heap does not shrink


def release_cached_memory(device: torch.device) -> None:
    """Return freed memory, which is kept for the next tensors, to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@dataclass(frozen=True)
class MemoryUsage:
    """The memory of this process, in bytes."""

    held: int  # what no other process can use (cuda: reserved by PyTorch; cpu: the resident set)
    peak: int  # largest `held` since `reset_peak`
    used: int | None = None  # memory of tensors (cuda only)
    device: int | None = None  # memory of the GPU in use by any process (cuda only)


def usage(device: torch.device) -> MemoryUsage:
    """Return the current memory of this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryUsage(
            held=torch.cuda.memory_reserved(device),
            peak=torch.cuda.max_memory_reserved(device),
            used=torch.cuda.memory_allocated(device),
            device=total - free,
        )
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, peak = (int(status[key].split()[0]) * 2**10 for key in ("VmRSS", "VmHWM"))
    return MemoryUsage(held=resident, peak=peak)


def reset_peak(device: torch.device) -> None:
    """Count the peak from now on. If the kernel does not allow that, the peak is that of the process since its start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5)
