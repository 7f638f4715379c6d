"""Accumulate the metrics of an update over its microbatches, then over ranks, and compare a batch's policies.

The comparisons are of the old policy's log-probs with the engine's and with the reference policy's.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.actor.output_stats import TRUNCATION_METRICS, mask_counts
from tepo_megatron.base.types import LossOutput, PackedMicrobatch, SamplingMask, TokenStats, TrainBatch
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.losses.diagnostics import HISTOGRAMS, METRICS
from tepo_megatron.losses.kl import ESTIMATORS
from tepo_megatron.monitor.metrics import BINS, Pair
from tepo_megatron.ops.context_parallel import Segments


@dataclass(frozen=True)
class UpdateResult:
    """The metrics of one optimizer step, on the host, the same on every rank."""

    metrics: dict[str, Pair]  # name -> (numerator, denominator)
    histograms: dict[str, Tensor]  # name -> int64 counts
    ratio_B: Tensor  # fp64, mean importance ratio of each sequence
    knows_entropy_change: bool  # whether dH is the effect of earlier updates. Otherwise it is 0 or rounding noise.
    mismatch: dict[str, float] | None = None  # `Actor.mismatch` of these sequences. None: this update did not measure it.
    # These sequences with their old statistics, valid on the last pipeline stage. None: as for `mismatch`.
    measured: TrainBatch | None = None


class MinibatchTokenStats:
    """A buffer for the log-probs and entropies (fp32, detached) of N response tokens. Ranks of the last stage add their own."""

    def __init__(self, tokens: int, groups: ParallelDims) -> None:
        self._groups = groups
        self._stats_N = torch.zeros(tokens, 2, device=groups.device)

    def add(self, microbatch: PackedMicrobatch, stats: TokenStats) -> None:
        """Add the statistics of one microbatch's rows."""
        self._stats_N[microbatch.token_R] = torch.stack((stats.logprob_R.detach(), stats.entropy_R.detach()), dim=1)

    def gather(self) -> TokenStats:
        """Return the statistics of all N tokens, valid on the last pipeline stage. Call it once.

        Collectives: on the last stage, one all-reduce of [N, 2] over dp x cp. One rank computes each token; the others add 0.
        """
        if self._groups.is_last_stage:
            dist.all_reduce(self._stats_N, group=self._groups.dp_cp.group)
        return TokenStats(self._stats_N[:, 0], self._stats_N[:, 1])


class UpdateAccumulator:
    """The sums over the microbatches of one update, on the last stage, in fp64, which holds the counts exactly.

    Args:
        whole: Collects the statistics of all tokens too. None: they are not collected.
        mask: The batch's sampling masks, on the device. None: sampling was not truncated.
    """

    def __init__(
        self,
        batch: TrainBatch,
        device: torch.device,
        whole: MinibatchTokenStats | None,
        mask: SamplingMask | None = None,
    ) -> None:
        self.whole, self._mask = whole, mask
        self._knows_entropy_change = batch.update > 0 and batch.old_entropies_N is not None
        self._pairs = torch.zeros(len(METRICS), 2, dtype=torch.float64, device=device)
        self._counts = torch.zeros(len(HISTOGRAMS), BINS, dtype=torch.float64, device=device)
        self._ratio_B = torch.zeros(len(batch), dtype=torch.float64, device=device)
        self._masks = torch.zeros(len(TRUNCATION_METRICS), 2, dtype=torch.float64, device=device)

    def add(self, out: LossOutput, microbatch: PackedMicrobatch, segments: Segments, stats: TokenStats) -> None:
        """Add one microbatch."""
        if self.whole is not None:
            self.whole.add(microbatch, stats)
        if stats.recomputed is not None and self._mask is not None:
            self._masks += mask_counts(stats.recomputed, self._mask.rows(microbatch.token_R))
        pairs = [torch.stack((n.double(), d.double())) for n, d in (out.metrics[name] for name in METRICS)]
        self._pairs += torch.stack(pairs)
        self._counts += torch.stack([out.histograms[name] for name in HISTOGRAMS])
        mean_R = (out.ratio_R / segments.spread(microbatch.lengths_G)).double()
        self._ratio_B.index_add_(0, microbatch.sequences_G[microbatch.sequence_R], mean_R)

    def reduce(self, groups: ParallelDims) -> UpdateResult:
        """Return the sums over dp x cp on every stage. Collectives: one all-reduce over dp x cp, one broadcast over pp."""
        parts = (self._pairs, self._counts, self._ratio_B, self._masks)
        flat = torch.cat([part.flatten() for part in parts])
        if groups.is_last_stage:
            dist.all_reduce(flat, group=groups.dp_cp.group)
        pairs, counts, ratio_B, masks = groups.broadcast_from_last_stage(flat).cpu().split([part.numel() for part in parts])
        names, values = (*METRICS, *TRUNCATION_METRICS), torch.cat((pairs, masks)).view(-1, 2).tolist()
        metrics = {name: (n, d) for name, (n, d) in zip(names, values, strict=True)}
        histograms = dict(zip(HISTOGRAMS, counts.view(-1, BINS).long(), strict=True))
        return UpdateResult(metrics, histograms, ratio_B, self._knows_entropy_change)


def mismatch(batch: TrainBatch, groups: ParallelDims) -> dict[str, float]:
    """Return the mismatch between the engine's log-probs and the actor's, and the actor's entropy, the same on every rank.

    Keys: `rollout/logprob_diff_mean`, `rollout/logprob_diff_max` (nats) and `actor/entropy` (nats per response token).
    Collectives: one broadcast over pp.
    """
    assert batch.old_logprobs_N is not None and batch.old_entropies_N is not None, "attach_old_stats comes first"
    diff_N = (batch.rollout_logprobs_N.to(groups.device) - batch.old_logprobs_N).abs()
    values = torch.stack((diff_N.mean(), diff_N.max(), batch.old_entropies_N.mean())).double()
    mean, largest, entropy = groups.broadcast_from_last_stage(values).tolist()
    return {"rollout/logprob_diff_mean": mean, "rollout/logprob_diff_max": largest, "actor/entropy": entropy}


def reference_divergence(batch: TrainBatch, estimator: str, groups: ParallelDims) -> Tensor:
    """Return KL(old, reference) summed over each response: [B] fp64 nats on the host. Collectives: one broadcast over pp."""
    divergence_B = torch.zeros(len(batch), dtype=torch.float64, device=groups.device)
    if groups.is_last_stage:
        assert batch.old_logprobs_N is not None and batch.ref_logprobs_N is not None, "attach both log-probs first"
        x_N = batch.old_logprobs_N - batch.ref_logprobs_N
        kl_N = ESTIMATORS[estimator](x_N, torch.zeros_like(x_N)).double()  # the old policy is the one that is measured
        divergence_B.index_add_(0, batch.sequence_N(kl_N.device), kl_N)
    return groups.broadcast_from_last_stage(divergence_B).cpu()
