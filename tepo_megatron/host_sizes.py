"""Sizes of page-locked host memory, for what allocates it and for `tepo plan`, which so count the same bytes. Without torch."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import accumulate

ALIGNMENT = 64  # bytes, of the start of a piece of an arena: enough for any dtype
LEAST_OFFLOADED = 2**20  # bytes: smaller activations stay on the device, because moving them costs more than it frees


def starts(sizes: Sequence[int]) -> list[int]:
    """Return where the pieces of an arena start, in bytes, and as the last number where they end.

    Args:
        sizes: bytes of each piece.
    """
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def block_bytes(size: int) -> int:
    """Return the bytes that are allocated for `size` bytes: whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def arena_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that an arena allocates for pieces of these sizes."""
    return block_bytes(starts(sizes)[-1])
