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

    noise_floor: nats, for the metrics alone. Raises AssertionError before the old pass.
    """

    def __init__(self, batch: TrainBatch, device: torch.device, noise_floor: float | None) -> None:
        assert batch.old_logprobs_N is not None and batch.old_entropies_N is not None, "attach_old_stats comes first"
        self._batch, self._device, self._noise_floor = batch, device, noise_floor
        self.old_stats = TokenStats(batch.old_logprobs_N.to(device), batch.old_entropies_N.to(device))
        self._advantages_B = batch.advantages_B.to(device)
        self._rollout_logprobs_N = batch.rollout_logprobs_N.to(device)
        self._ref_logprobs_N = None if batch.ref_logprobs_N is None else batch.ref_logprobs_N.to(device)
        self._whole = Denominators(
            tokens=torch.tensor(float(max(1, batch.num_tokens)), device=device),
            sequences=torch.tensor(float(len(batch)), device=device),
        )

    def rows(self, microbatch: PackedMicrobatch, segments: Segments, weights: BatchStatistics | None) -> LossInputs:
        """Of a microbatch's response rows."""
        token_R = microbatch.token_R
        return self._inputs(
            token_R,
            segments.spread(self._advantages_B[microbatch.sequences_G]),
            segments,
            None if weights is None else weights.rows(token_R),
        )

    def whole(self) -> LossInputs:
        """Of all N response tokens, as if one rank held them in one microbatch."""
        sequence_N = self._batch.sequence_N.to(self._device)
        segments = Segments(
            sequence_N,
            torch.tensor(self._batch.response_lengths, dtype=torch.float32, device=self._device).clamp(min=1),
            position_R=self._batch.token_keys_N[:, 1].to(self._device),
            chunk_R=torch.zeros_like(sequence_N),
        )
        return self._inputs(
            torch.arange(sequence_N.numel(), device=self._device), self._advantages_B[sequence_N], segments, None
        )

    def _inputs(self, token_R: Tensor, advantage_R: Tensor, segments: Segments, weights: TokenWeights | None) -> LossInputs:
        ref = self._ref_logprobs_N
        return LossInputs(
            advantage_R=advantage_R,
            old_logprob_R=self.old_stats.logprob_R[token_R],
            old_entropy_R=self.old_stats.entropy_R[token_R],
            rollout_logprob_R=self._rollout_logprobs_N[token_R],
            segments=segments,
            whole=self._whole,
            ref_logprob_R=None if ref is None else ref[token_R],
            weights=weights,
            noise_floor=self._noise_floor,
        )
