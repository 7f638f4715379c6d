"""Sums over sequences whose tokens may lie on several context-parallel ranks.

This is the only way in which context parallelism reaches a loss. Layout: _R response rows on this rank, _G sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.types import PackedMicrobatch


@dataclass(frozen=True)
class Segments:
    """Which sequence each row belongs to.

    sequence_R: int64 in [0, G), the rows of a sequence together and in their order; lengths_G: |y| over all context-parallel
    ranks, at least 1; group: the context-parallel group, None for one rank (never the world). For running sums alone:
    position_R, int64, place of the row in its response, from 0; chunk_R: int64 in [0, chunks), the part of the sequence in
    which the row lies, each part on one rank; chunks: of a sequence, 1 without context parallelism.
    """

    sequence_R: Tensor
    lengths_G: Tensor
    group: dist.ProcessGroup | None = None
    position_R: Tensor | None = None
    chunk_R: Tensor | None = None
    chunks: int = 1

    @classmethod
    def of(cls, microbatch: PackedMicrobatch, group: dist.ProcessGroup | None) -> Segments:
        """The segments of a packed microbatch; group: its context-parallel group."""
        return cls(
            microbatch.sequence_R,
            microbatch.lengths_G,
            group,
            microbatch.position_R,
            microbatch.chunk_R,
            microbatch.chunks,
        )

    def sum(self, x_R: Tensor) -> Tensor:
        """[G] sums over whole sequences, differentiable.

        Collectives: forward one all-reduce of G numbers over the context-parallel group; backward one (each rank's loss
        holds its own rows, so the gradient of a sequence's sum is the sum over ranks).
        """
        local_G = self._local_sum(x_R)
        return local_G if self._alone else _AllReduceBothWays.apply(local_G, self.group)

    def sum_detached(self, x_R: Tensor) -> Tensor:
        """[G] sums over whole sequences, without gradient. Collectives: forward one all-reduce of G numbers; backward none."""
        local_G = self._local_sum(x_R.detach())
        if not self._alone:
            dist.all_reduce(local_G, group=self.group)
        return local_G

    def mean(self, x_R: Tensor) -> Tensor:
        """sum(x) / |y|. Collectives as `sum`."""
        return self.sum(x_R) / self.lengths_G

    def mean_detached(self, x_R: Tensor) -> Tensor:
        """sum(x) / |y|, without gradient. Collectives as `sum_detached`."""
        return self.sum_detached(x_R) / self.lengths_G

    def spread(self, x_G: Tensor) -> Tensor:
        """Each row gets its sequence's value: [G] -> [R]."""
        return x_G.index_select(0, self.sequence_R)

    def running_mean(self, x_R: Tensor) -> Tensor:
        """[R]: the mean of x over the row's sequence from its first response token to the row itself, differentiable.

        Collectives: forward one all-reduce of G x chunks sums (fp64); backward one of the same size.
        """
        assert self.position_R is not None and self.chunk_R is not None, "running sums need position_R and chunk_R"
        total_R = _RunningSum.apply(x_R, self)
        return total_R / (self.position_R + 1)

    @property
    def _alone(self) -> bool:
        # all context-parallel ranks hold the same sequences, so all of them skip when there are none
        return self.group is None or self.group.size() == 1 or self.lengths_G.numel() == 0

    def _local_sum(self, x_R: Tensor) -> Tensor:
        return x_R.new_zeros(self.lengths_G.numel()).index_add(0, self.sequence_R, x_R)

    def _running_sum(self, x_R: Tensor, *, reverse: bool) -> Tensor:
        """Inclusive sums from the first row of each sequence (reverse: from its last). Collectives: one all-reduce.

        In fp64: the local scan runs over the whole microbatch, and what came before a chunk is subtracted again.
        """
        assert self.chunk_R is not None
        x_R = x_R.double()
        piece_R = self.sequence_R * self.chunks + self.chunk_R
        pieces = x_R.new_zeros(self.lengths_G.numel() * self.chunks)
        sums_P = pieces.index_add(0, piece_R, x_R)
        # pieces lie one after another in the rows, those of a sequence in ascending order of their chunks
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
    """Sum over the group in forward, and of the gradients in backward."""

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
    """Running sums in forward, and of the gradients from the other end in backward."""

    @staticmethod
    def forward(ctx: Any, x_R: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments._running_sum(x_R, reverse=False).to(x_R.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.segments._running_sum(grads[0], reverse=True).to(grads[0].dtype), None
