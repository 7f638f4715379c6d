"""Sizes of page-locked host memory. The allocating code and `tepo plan` share them, so both count the same bytes. No torch."""

import mmap
from collections.abc import Sequence
from itertools import accumulate

ALIGNMENT = 64  # bytes; alignment of the pieces of an arena, enough for any dtype
LEAST_OFFLOADED = 2**20  # bytes; smaller activations stay on the device, because moving them costs more than it frees


def starts(sizes: Sequence[int]) -> list[int]:
    """Return the start of each piece of an arena, in bytes, and the end of the last piece as the last number."""
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def block_bytes(size: int) -> int:
    """Return the bytes allocated for `size` bytes, in whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def arena_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that an arena allocates for pieces of these sizes (bytes)."""
    return block_bytes(starts(sizes)[-1])
