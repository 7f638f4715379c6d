"""Megatron's zigzag layout of a sequence over context-parallel (CP) ranks.

A sequence is split into 2 cp chunks of equal length; rank r holds chunks r and 2 cp - 1 - r, in this order. An early chunk,
which attends to few tokens, is paired with a late one, so that causal attention costs every rank the same. Packed sequences are
split one by one. All functions are pure; nothing here communicates."""

from collections.abc import Sequence

import torch
from torch import Tensor


def zigzag_chunks(cp_size: int, cp_rank: int) -> tuple[int, ...]:
    """Return the chunks that a rank holds, of 2 cp_size chunks per sequence."""
    return (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank)


def zigzag_rows(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return the indices of the packed tokens that a rank holds, in its order: int64 [S / cp_size], on `cu_seqlens`' device.

    Raises ValueError if with context parallelism, 2 cp_size does not divide the length of a sequence.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    _check_lengths(lengths.tolist(), cp_size)
    pieces = zigzag_chunks(cp_size, cp_rank)
    chunk = lengths // (1 if cp_size == 1 else 2 * cp_size)
    first = torch.stack([starts + i * chunk for i in pieces], dim=1).flatten()  # of every chunk, in the rank's order
    return concatenated_ranges(first, chunk.repeat_interleave(len(pieces)))


def concatenated_ranges(first: Tensor, size: Tensor) -> Tensor:
    """Return n ranges of consecutive integers, one after another: int64 [sum of size].

    Args:
        first: int64 [n], the first integer of each range.
        size: int64 [n], the length of each range; it may be 0.
    """
    before = size.cumsum(0) - size
    return torch.arange(int(size.sum()), device=size.device) + (first - before).repeat_interleave(size)


def _check_lengths(lengths: Sequence[int], cp_size: int) -> None:
    for i, length in enumerate(lengths if cp_size > 1 else ()):
        if length % (2 * cp_size):
            raise ValueError(
                f"sequence {i} has {length} tokens, which 2 * cp = {2 * cp_size} zigzag chunks do not divide; pad it to a "
                f"multiple of {2 * cp_size}"
            )
