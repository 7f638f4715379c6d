"""A minibatch's flat tensors on the device, and the part of them that a microbatch's loss needs."""

from __future__ import annotations

import torch
from torch import Tensor

from tepo_megatron.losses.inputs import LossInputs
from tepo_megatron.losses.weighting import BatchStatistics, TokenWeights
from tepo_megatron.ops.segments import Segments
from tepo_megatron.types import Denominators, PackedMicrobatch, TokenStats, TrainBatch


class MinibatchInputs:
    """The `LossInputs` of any microbatch of a minibatch, and of all its tokens at once.

    In the first update of a rollout batch the old statistics are those of the current pass itself (ratio 1, dH 0, exactly),
    also where an old pass was made for the later updates: repeated under another packing, bf16 alone moves a sequence's ratio
    by more than GSPO's clip range of 3e-4.

    Args:
        batch: the minibatch. Old log-probs without old entropies are the engine's, and used in every update.
        device: of the tensors that the loss gets.
        noise_floor: nats, for the metrics alone.
    """

    def __init__(self, batch: TrainBatch, device: torch.device, noise_floor: float | None) -> None:
        self._batch, self._device, self._noise_floor = batch, device, noise_floor
        self._old_logprobs_N = None if batch.old_logprobs_N is None else batch.old_logprobs_N.to(device)
        self._old_entropies_N = None if batch.old_entropies_N is None else batch.old_entropies_N.to(device)
        self._advantages_B = batch.advantages_B.to(device)
        self._rollout_logprobs_N = batch.rollout_logprobs_N.to(device)
        self._ref_logprobs_N = None if batch.ref_logprobs_N is None else batch.ref_logprobs_N.to(device)
        self._whole = Denominators(
            tokens=torch.tensor(float(max(1, batch.num_tokens)), device=device),
            sequences=torch.tensor(float(len(batch)), device=device),
        )

    @property
    def old_stats(self) -> TokenStats | None:
        """Log-probs and entropies (_N) of an old pass, which alone knows the entropies; None without one."""
        if self._old_logprobs_N is None or self._old_entropies_N is None:
            return None
        return TokenStats(self._old_logprobs_N, self._old_entropies_N)

    def rows(
        self, microbatch: PackedMicrobatch, segments: Segments, stats: TokenStats, weights: BatchStatistics | None
    ) -> LossInputs:
        """Of a microbatch's response rows. stats: the current ones, which stand for old ones that are not known."""
        token_R = microbatch.token_R
        return self._inputs(
            token_R,
            segments.spread(self._advantages_B[microbatch.sequences_G]),
            segments,
            stats,
            None if weights is None else weights.rows(token_R),
        )

    def whole(self, stats_N: TokenStats) -> LossInputs:
        """Of all N response tokens, as if one rank held them in one microbatch. stats_N: the current ones."""
        sequence_N = self._batch.sequence_N.to(self._device)
        segments = Segments(
            sequence_N,
            torch.tensor(self._batch.response_lengths, dtype=torch.float32, device=self._device).clamp(min=1),
            position_R=self._batch.token_keys_N[:, 1].to(self._device),
            chunk_R=torch.zeros_like(sequence_N),
        )
        return self._inputs(
            torch.arange(sequence_N.numel(), device=self._device), self._advantages_B[sequence_N], segments, stats_N, None
        )

    def _inputs(
        self, token_R: Tensor, advantage_R: Tensor, segments: Segments, stats: TokenStats, weights: TokenWeights | None
    ) -> LossInputs:
        logprobs, entropies, ref = self._old_logprobs_N, self._old_entropies_N, self._ref_logprobs_N
        if self._batch.update == 0 and entropies is not None:
            logprobs = entropies = None
        return LossInputs(
            advantage_R=advantage_R,
            old_logprob_R=stats.logprob_R.detach() if logprobs is None else logprobs[token_R],
            old_entropy_R=stats.entropy_R.detach() if entropies is None else entropies[token_R],
            rollout_logprob_R=self._rollout_logprobs_N[token_R],
            segments=segments,
            whole=self._whole,
            ref_logprob_R=None if ref is None else ref[token_R],
            weights=weights,
            noise_floor=self._noise_floor,
        )
