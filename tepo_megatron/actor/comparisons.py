"""Compare the log-probs of a batch's old policy with the engine's and with the reference policy's."""

import torch
from torch import Tensor

from tepo_megatron.base.types import TrainBatch
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.losses.kl import ESTIMATORS


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
