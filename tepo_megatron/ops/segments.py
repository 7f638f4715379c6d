"""Sums over sequences whose tokens may lie on several context-parallel ranks.

This is the only way in which context parallelism reaches a loss. Layout: _R response rows on this rank, _G sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Which sequence each row belongs to.

    sequence_R: int64 in [0, G); lengths_G: |y| over all context-parallel ranks, at least 1;
    group: the context-parallel group, None for one rank (never the world).
    """

    sequence_R: Tensor
    lengths_G: Tensor
    group: dist.ProcessGroup | None = None

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

    @property
    def _alone(self) -> bool:
        # all context-parallel ranks hold the same sequences, so all of them skip when there are none
        return self.group is None or self.group.size() == 1 or self.lengths_G.numel() == 0

    def _local_sum(self, x_R: Tensor) -> Tensor:
        return x_R.new_zeros(self.lengths_G.numel()).index_add(0, self.sequence_R, x_R)


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
