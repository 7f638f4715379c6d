"""Sequences over context-parallel (CP) ranks: Megatron's zigzag layout, and sums and means over split sequences.

A sequence is split into 2 cp chunks of equal length; rank r holds chunks r and 2 cp - 1 - r, in this order. An early chunk,
which attends to few tokens, is paired with a late one, so that causal attention costs every rank the same. Packed sequences are
split one by one. All functions are pure; nothing here communicates.

A loss communicates over CP ranks only through the sums and means. Suffixes: _R response rows on this rank, _G sequences, _P
chunks of sequences (a piece here is one chunk of one sequence).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.base.types import PackedMicrobatch


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


@dataclass(frozen=True)
class Segments:
    """The sequence that each response row of a microbatch belongs to."""

    sequence_R: Tensor  # int64 in [0, G), the sequence of the row. The rows of a sequence are contiguous and in order.
    lengths_G: Tensor  # response tokens |y| of each sequence over all context-parallel ranks, at least 1
    group: dist.ProcessGroup | None = None  # Context-parallel group. None: one rank (never the world).
    position_R: Tensor | None = None  # int64, index of the row in its response, from 0. Only running means need it.
    # int64 in [0, chunks), the chunk of the sequence that holds the row. A chunk is on one rank. Only running means need it.
    chunk_R: Tensor | None = None
    chunks: int = 1  # number of chunks per sequence, 1 without context parallelism

    @classmethod
    def of(cls, microbatch: PackedMicrobatch, group: dist.ProcessGroup | None) -> "Segments":
        """Return the segments of a packed microbatch. `group`: Context-parallel group. None: one rank."""
        return cls(
            microbatch.sequence_R, microbatch.lengths_G, group, microbatch.position_R, microbatch.chunk_R, microbatch.chunks
        )

    def sum(self, x_R: Tensor) -> Tensor:
        """Return the sum of x over each whole sequence, [G], differentiable.

        Collectives: forward one all-reduce of G numbers over the context-parallel group; backward one of the same size, because
        the loss on each rank contains only its own rows, so that the gradient of a sequence's sum is a sum over ranks.
        """
        local_G = self._local_sum(x_R)
        return local_G if self._alone else _AllReduceBothWays.apply(local_G, self.group)

    def sum_detached(self, x_R: Tensor) -> Tensor:
        """Return the sum of x over each whole sequence, [G], without gradient. Collectives: one all-reduce of G numbers."""
        local_G = self._local_sum(x_R.detach())
        if not self._alone:
            dist.all_reduce(local_G, group=self.group)
        return local_G

    def mean(self, x_R: Tensor) -> Tensor:
        """Return sum(x) / |y| of each sequence, [G], differentiable. Collectives: those of `sum`."""
        return self.sum(x_R) / self.lengths_G

    def mean_detached(self, x_R: Tensor) -> Tensor:
        """Return sum(x) / |y| of each sequence, [G], without gradient. Collectives: those of `sum_detached`."""
        return self.sum_detached(x_R) / self.lengths_G

    def spread(self, x_G: Tensor) -> Tensor:
        """Return the value of its sequence for each row: [G] -> [R]. No collective."""
        return x_G.index_select(0, self.sequence_R)

    def running_mean(self, x_R: Tensor) -> Tensor:
        """Return the mean of x from the first response token of the sequence to each row itself, [R], differentiable.

        Collectives: forward one all-reduce of G x chunks sums (fp64); backward one of the same size.
        """
        assert self.position_R is not None and self.chunk_R is not None, "running sums need position_R and chunk_R"
        return _RunningSum.apply(x_R, self) / (self.position_R + 1)

    @property
    def _alone(self) -> bool:
        # all context-parallel ranks hold the same sequences, so all of them skip the collective when there are none
        return self.group is None or self.group.size() == 1 or self.lengths_G.numel() == 0

    def _local_sum(self, x_R: Tensor) -> Tensor:
        return x_R.new_zeros(self.lengths_G.numel()).index_add(0, self.sequence_R, x_R)

    def _running_sum(self, x_R: Tensor, *, reverse: bool) -> Tensor:
        """Return inclusive sums from the first row of each sequence (reverse: from its last). Collectives: one all-reduce.

        Computed in fp64, because the local scan runs over the whole microbatch and the sum before each chunk is subtracted.
        """
        assert self.chunk_R is not None
        x_R = x_R.double()
        piece_R = self.sequence_R * self.chunks + self.chunk_R
        sums_P = x_R.new_zeros(self.lengths_G.numel() * self.chunks).index_add(0, piece_R, x_R)
        # the rows of a piece are contiguous, and the pieces of a sequence are in ascending order of their chunks
        inside_R = x_R.cumsum(0) - (sums_P.cumsum(0) - sums_P)[piece_R]
        if reverse:
            inside_R = sums_P[piece_R] - inside_R + x_R
        if not self._alone:
            dist.all_reduce(sums_P, group=self.group)
        sums_GC = sums_P.view(-1, self.chunks)
        through_GC = sums_GC.cumsum(1)
        others_GC = through_GC[:, -1:] - through_GC if reverse else through_GC - sums_GC
        return inside_R + others_GC.flatten()[piece_R]


class _AllReduceBothWays(torch.autograd.Function):
    """Sum over the group: the values in forward, the gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _RunningSum(torch.autograd.Function):
    """Running sums of the values in forward, and of the gradients from the other end in backward."""

    @staticmethod
    def forward(ctx: Any, x_R: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments._running_sum(x_R, reverse=False).to(x_R.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.segments._running_sum(grads[0], reverse=True).to(grads[0].dtype), None
