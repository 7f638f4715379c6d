"""Token statistics of a whole minibatch, collected from its microbatches on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tepo_megatron.distributed.parallel import ParallelDims
from tepo_megatron.types import PackedMicrobatch, TokenStats


class MinibatchTokenStats:
    """A buffer for the log-probs and entropies (fp32, detached) of N response tokens. Ranks of the last stage add their own."""

    def __init__(self, tokens: int, groups: ParallelDims) -> None:
        self._groups = groups
        self._stats_N = torch.zeros(tokens, 2, device=groups.device)

    def add(self, microbatch: PackedMicrobatch, stats: TokenStats) -> None:
        """Add the statistics of one microbatch's rows.

        Args:
            microbatch: The microbatch, on the device.
            stats: Its token statistics.
        """
        rows = torch.stack((stats.logprob_R.detach(), stats.entropy_R.detach()), dim=1)
        self._stats_N[microbatch.token_R] = rows

    def gather(self) -> TokenStats:
        """Return the statistics of all N tokens, valid on the last pipeline stage. Call it once.

        Collectives: on the last stage, one all-reduce of [N, 2] over dp x cp. One rank computes each token; the others add 0.
        """
        if self._groups.is_last_stage:
            dist.all_reduce(self._stats_N, group=self._groups.dp_cp.group)
        return TokenStats(self._stats_N[:, 0], self._stats_N[:, 1])
