"""Token statistics of a whole minibatch, put together from those of its microbatches."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tepo_megatron.parallel import Groups
from tepo_megatron.types import PackedMicrobatch, TokenStats


class WholeStats:
    """Log-probs and entropies of N response tokens (fp32), without gradient; each rank of the last stage adds its own."""

    def __init__(self, tokens: int, groups: Groups) -> None:
        self._groups = groups
        self._stats_N = torch.zeros(tokens, 2, device=groups.device)

    def add(self, microbatch: PackedMicrobatch, stats: TokenStats) -> None:
        """Those of one microbatch's rows."""
        rows = torch.stack((stats.logprob_R.detach(), stats.entropy_R.detach()), dim=1)
        self._stats_N[microbatch.token_R] = rows

    def gather(self) -> TokenStats:
        """All N, valid on the last pipeline stage; once. Collectives: there, one all-reduce of [N, 2] over dp x cp (each
        token is computed by one rank; the others add 0).
        """
        if self._groups.is_last_stage:
            dist.all_reduce(self._stats_N, group=self._groups.dp_cp.group)
        return TokenStats(self._stats_N[:, 0], self._stats_N[:, 1])
