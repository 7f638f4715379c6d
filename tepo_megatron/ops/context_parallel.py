"""Megatron's layout of a sequence over context-parallel (CP) ranks: zigzag.

A sequence is cut into 2 cp chunks of equal length; rank r holds chunks r and 2 cp - 1 - r, in this order. An early chunk, which
attends to little, travels with a late one, so causal attention costs every rank the same. Packed sequences are cut one by one.
Pure functions; nothing here communicates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def zigzag_chunks(cp_size: int, cp_rank: int) -> tuple[int, ...]:
    """The chunks of a rank, out of 2 cp_size; without context parallelism (cp_size 1) the sequence is one chunk."""
    return (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank)


def shard_zigzag_packed(x_S: Tensor, cu_seqlens: Tensor, cp_size: int, cp_rank: int, dim: int) -> Tensor:
    """This rank's part of each of several sequences packed along `dim`, packed again: [..., S, ...] -> [..., S / cp_size, ...].

    cu_seqlens: integer [G + 1], where each sequence starts, and S. Raises ValueError unless 2 cp_size divides every length (any
    length without context parallelism).
    """
    if cp_size == 1:
        return x_S
    return x_S.index_select(dim, zigzag_rows(cu_seqlens, cp_size, cp_rank).to(x_S.device))


def zigzag_rows(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Which of the S packed tokens a rank holds, in its order: int64 [S / cp_size], on the device of `cu_seqlens`.

    Raises ValueError as `shard_zigzag_packed` does.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    _check_lengths(lengths.tolist(), cp_size)
    pieces = zigzag_chunks(cp_size, cp_rank)
    chunk = lengths // (1 if cp_size == 1 else 2 * cp_size)
    first = torch.stack([starts + i * chunk for i in pieces], dim=1).flatten()  # of every piece, in the rank's order
    return concatenated_ranges(first, chunk.repeat_interleave(len(pieces)))


def concatenated_ranges(first: Tensor, size: Tensor) -> Tensor:
    """first[0], first[0] + 1, ... (size[0] of them), first[1], ...: int64 [sum of size]. Both arguments: int64 [n]."""
    before = size.cumsum(0) - size
    return torch.arange(int(size.sum()), device=size.device) + (first - before).repeat_interleave(size)


def _check_lengths(lengths: Sequence[int], cp_size: int) -> None:
    if cp_size == 1:
        return
    for i, length in enumerate(lengths):
        if length % (2 * cp_size):
            raise ValueError(
                f"sequence {i} has {length} tokens, which 2 * cp = {2 * cp_size} zigzag chunks do not divide; pad it to a "
                f"multiple of {2 * cp_size}"
            )
