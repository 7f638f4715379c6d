"""The memory of this process: keep it, return it to the device, report it, and allocate host memory that a GPU accesses.

The host memory has an exact size; it is page-locked on CUDA and plain on a CPU. PyTorch's allocator of page-locked memory
rounds each block up to a power of two (`CachingHostAllocator.h`), which for the state of a 14B model takes 314 GiB instead of
220. Here a block is an anonymous mapping that `cudaHostRegister` page-locks. Tensors in it are pinned for PyTorch
(`is_pinned`), so that copies to and from them are asynchronous. See decision 0025.
"""

import contextlib
import ctypes
import mmap
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tepo_megatron.base.hardware import arena_bytes, block_bytes, starts

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


_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of madvise(2), which Python's mmap does not name


class _Mapping(mmap.mmap):
    """Private memory of whole pages. It is unlocked and unmapped when the last tensor in it is gone.

    A child that `fork` makes reads zeros here. Otherwise the kernel would copy page-locked pages for the child or, before Linux
    5.9, could leave the GPU writing to pages that the parent no longer has.
    """

    locked_at: int | None = None
    owner: int

    def __new__(cls, size: int, device: torch.device) -> "_Mapping":
        """Map `size` bytes, and page-lock them if `device` is a GPU."""
        self = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.madvise(_WIPE_ON_FORK)
        self.owner = os.getpid()
        if device.type == "cuda":
            address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
            if status := int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)):
                raise RuntimeError(
                    f"CUDA error {status}: cudaHostRegister could not lock {size / 2**30:.2f} GiB of host memory; compare what "
                    "`tepo plan` says of a machine's memory with the machine's, and with the container's limit"
                )
            self.locked_at = address
        return self

    def __del__(self) -> None:
        if self.locked_at is None or self.owner != os.getpid() or sys.is_finalizing():
            return  # the end of the process unlocks its memory
        torch.cuda.synchronize()  # copies may be in flight
        torch.cuda.cudart().cudaHostUnregister(self.locked_at)


class HostArena:
    """One block for several tensors that are used together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: _Mapping | None = None

    @property
    def allocated(self) -> int:
        """Return the bytes that are allocated."""
        return 0 if self._memory is None else len(self._memory)

    def pieces(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return one uint8 tensor of each size, each with a storage of its own.

        The next call reuses the memory, so do not use earlier pieces after it. If the next call needs more memory, the block is
        freed before the larger one is allocated, provided that no piece of it is referenced any more. `sizes`: bytes of each
        piece.
        """
        needed = arena_bytes(sizes)
        if needed > self.allocated:
            self._memory = None
            self._memory = _Mapping(needed, self._device)
        return [_piece(self._memory, start, size) for start, size in zip(starts(sizes), sizes, strict=False)]


class HostPiece:
    """Memory for one tensor, borrowed from a stack until this object is deleted. `data`: the memory, uint8."""

    def __init__(self, data: Tensor, stack: "_Stack", returned: "deque[_Stack]") -> None:
        self.data, self._stack, self._returned = data, stack, returned

    def __del__(self) -> None:
        self._returned.append(self._stack)


class _Stack:
    """The pieces of one microbatch, one after the other."""

    def __init__(self) -> None:
        self.used = self.in_use = 0
        self._memory: _Mapping | None = None
        self._beyond: list[_Mapping] = []  # one mapping for each piece that did not fit into the memory
        self._spare: list[_Mapping] = []  # those of earlier microbatches, for reuse

    @property
    def allocated(self) -> int:
        return sum(len(memory) for memory in (self._memory, *self._beyond, *self._spare) if memory is not None)

    def restart(self) -> None:
        self.used = 0
        self._spare += self._beyond
        self._beyond = []

    def consolidate(self, size: int, device: torch.device) -> None:
        """Make the stack empty, and leave it one block and no other memory. No piece may be in use."""
        self.restart()
        self._spare = []
        if size and (self._memory is None or len(self._memory) < size):
            self._memory = None
            self._memory = _Mapping(block_bytes(size), device)

    def push(self, size: int, device: torch.device) -> Tensor:
        """Return memory for the next piece, uint8. `size`: bytes of the piece."""
        start, self.used = self.used, self.used + starts([size])[-1]
        if self._memory is not None and self.used <= len(self._memory):
            return _piece(self._memory, start, size)
        fitting = [memory for memory in self._spare if len(memory) >= size]
        memory = min(fitting, key=len) if fitting else _Mapping(block_bytes(size), device)
        if fitting:
            self._spare = [other for other in self._spare if other is not memory]
        self._beyond.append(memory)
        return _piece(memory, 0, size)


class HostStacks:
    """Memory for the tensors of several microbatches at once, which are pushed one by one and released in any order.

    Each microbatch in flight has a stack. A stack has the size of the largest microbatch before the last `settle`; what exceeds
    it is allocated piece by piece. So the total is the size of the largest microbatch times the number of microbatches in
    flight, and somewhat more until the first `settle`.

    Memory is unlocked only in `settle`. Unlocking waits for the device, and in the middle of a pipeline schedule the device may
    wait for data that this rank has yet to send. The caller must order its first write to a piece after the last use of the
    same memory, for example with streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stacks: list[_Stack] = []
        self._current: _Stack | None = None
        self._largest = 0
        self._returned: deque[_Stack] = deque()  # a piece may be collected at any moment, in any thread

    @property
    def allocated(self) -> int:
        """Return the bytes that are allocated."""
        return sum(stack.allocated for stack in self._stacks)

    def settle(self) -> None:
        """Resize all stacks whose pieces were returned to the largest microbatch so far. No microbatch may be in flight."""
        self._collect()
        self._current = None
        for stack in self._stacks:
            if not stack.in_use:
                stack.consolidate(self._largest, self._device)

    def begin(self) -> None:
        """Begin another microbatch, to which the pieces of later `take` calls belong."""
        self._collect()
        if (free := next((stack for stack in self._stacks if not stack.in_use), None)) is None:
            free = _Stack()
            self._stacks.append(free)
        free.restart()
        self._current = free

    def take(self, size: int) -> HostPiece:
        """Return memory for `size` bytes."""
        if self._current is None:
            self.begin()
        stack = self._current
        assert stack is not None
        data = stack.push(size, self._device)
        stack.in_use += 1
        return HostPiece(data, stack, self._returned)

    def _collect(self) -> None:
        """Update the size of the largest microbatch, and count the pieces that were returned."""
        self._largest = max(self._largest, self._current.used if self._current is not None else 0)
        while self._returned:
            self._returned.popleft().in_use -= 1


def _piece(memory: _Mapping | None, start: int, size: int) -> Tensor:
    if memory is None or size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
