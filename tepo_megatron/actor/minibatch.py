"""Divide a batch into microbatches over the data-parallel ranks, and give those of this rank their tensors and loss inputs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tepo_megatron.base.types import Denominators, PackedMicrobatch, TokenStats, TrainBatch
from tepo_megatron.config import TrainingConfig
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.losses.objective import LossInputs
from tepo_megatron.losses.weighting import BatchStatistics, TokenWeights
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.context_parallel import Segments
from tepo_megatron.ops.packing import LEAST_SAVED, PrefixGroups, pack
from tepo_megatron.ops.pipeline_time import Pipeline
from tepo_megatron.ops.planning import Plan, plan_metrics, plan_microbatches


class Packer:
    """Plans the microbatches of a batch, the same plan on every rank, and packs them. Only `fetch_experts` uses collectives.

    `fetch_experts`: called on every rank before experts are packed, with the indices in the rollout batch of the sequences that
    each data-parallel rank packs. None: all experts are there.
    """

    def __init__(
        self, cfg: TrainingConfig, groups: ParallelDims, alignment: Alignment, shares_prompts: bool, replays_experts: bool
    ) -> None:
        self.alignment = alignment
        self.fetch_experts: Callable[[Sequence[Sequence[int]]], None] | None = None
        self._cfg, self._groups, self._shares, self._replays = cfg, groups, shares_prompts, replays_experts
        self._pipeline = Pipeline(groups.pp.size, groups.vpp)

    def plan(self, batch: TrainBatch, max_tokens: int | None = None, longest_first: bool = True) -> Plan:
        """Return the plan of the microbatches. Under virtual pipelining their number is a multiple of pp.

        `max_tokens`: most tokens of a microbatch. None: that of an update, `training.max_tokens_per_microbatch`.
        """
        return plan_microbatches(
            batch.lengths,
            self._groups.dp.size,
            max_tokens or self._cfg.max_tokens_per_microbatch,
            self.alignment,
            multiple_of=self._groups.pp.size if self._groups.vpp > 1 else 1,
            longest_first=longest_first,
            pipeline=self._pipeline,
            prefix_groups=self._prefix_groups(batch),
        )

    def pack(self, batch: TrainBatch, plan: Plan, replays: bool = True) -> list[PackedMicrobatch]:
        """Return this rank's packed microbatches.

        `replays`: False: without the experts of the tokens, even if they are replayed.
        """
        token_ids = [r.token_ids_L for r in batch.rollouts]
        masks = [r.response_mask_L for r in batch.rollouts]
        experts = batch.experts if replays and self._replays else None
        if experts is not None and self.fetch_experts is not None:
            ids = range(len(batch)) if batch.ids_B is None else batch.ids_B.tolist()
            self.fetch_experts([[ids[i] for indices in of_rank for i in indices] for of_rank in plan])
        prefix_groups = self._prefix_groups(batch)
        return [
            pack(token_ids, masks, batch.first_tokens, indices, self.alignment, self._groups.cp.rank, experts, prefix_groups)
            for indices in plan[self._groups.dp.rank]
        ]

    def metrics(self, batch: TrainBatch, plan: Plan) -> dict[str, float]:
        """Return the metrics of `plan_metrics`."""
        return plan_metrics(plan, batch.lengths, self.alignment, self._pipeline, prefix_groups=self._prefix_groups(batch))

    def _prefix_groups(self, batch: TrainBatch) -> PrefixGroups | None:
        if not self._shares:
            return None
        least_saved = 0 if self._cfg.share_prompts == "always" else LEAST_SAVED
        return PrefixGroups.of(batch.prompt_ids, batch.prompt_lengths, self.alignment.sequence, least_saved)


class MinibatchInputs:
    """A source of `LossInputs`, for any microbatch of a minibatch or for all its tokens at once.

    In the first update of a rollout batch the old statistics are those of the current pass itself (ratio 1, dH 0, exactly),
    even if an old pass was made for the later updates. Under another packing, bf16 rounding alone moves a sequence's ratio by
    more than GSPO's clip range of 3e-4. `noise_floor`: noise floor of dH in nats, for metrics only. None: not known.
    """

    def __init__(self, batch: TrainBatch, device: torch.device, noise_floor: float | None, max_response_tokens: int) -> None:
        self._batch, self._device, self._noise_floor = batch, device, noise_floor
        self._old_logprobs_N = None if batch.old_logprobs_N is None else batch.old_logprobs_N.to(device)
        self._old_entropies_N = None if batch.old_entropies_N is None else batch.old_entropies_N.to(device)
        self._advantages_B = batch.advantages_B.to(device)
        self._rollout_logprobs_N = batch.rollout_logprobs_N.to(device)
        self._ref_logprobs_N = None if batch.ref_logprobs_N is None else batch.ref_logprobs_N.to(device)
        tokens_of = _tokens_of_prompts(batch)
        self._whole = Denominators(
            tokens=torch.tensor(float(max(1, batch.num_tokens)), device=device),
            sequences=torch.tensor(float(len(batch)), device=device),
            prompts=torch.tensor(float(len(tokens_of)), device=device),
            max_response_tokens=torch.tensor(float(max_response_tokens), device=device),
        )
        group_tokens = [float(max(1, tokens_of[rollout.prompt_id])) for rollout in batch.rollouts]
        self._group_tokens_B = torch.tensor(group_tokens, device=device)

    @property
    def old_stats(self) -> TokenStats | None:
        """Return the log-probs and entropies (_N) of the old pass; None if there was none (only that pass has entropies)."""
        if self._old_logprobs_N is None or self._old_entropies_N is None:
            return None
        return TokenStats(self._old_logprobs_N, self._old_entropies_N)

    def rows(
        self, microbatch: PackedMicrobatch, segments: Segments, stats: TokenStats, weights: BatchStatistics | None
    ) -> LossInputs:
        """Return the inputs for the response rows of a microbatch."""
        token_R = microbatch.token_R
        sequence_R = segments.spread(microbatch.sequences_G)
        return self._inputs(token_R, sequence_R, segments, stats, None if weights is None else weights.rows(token_R))

    def whole(self, stats_N: TokenStats) -> LossInputs:
        """Return the inputs for all N response tokens, as if one rank held them in one microbatch.

        `stats_N`: current statistics. They also serve as the old ones if these are unknown.
        """
        sequence_N = self._batch.sequence_N(self._device)
        lengths_B = torch.tensor(self._batch.response_lengths, dtype=torch.float32, device=self._device).clamp(min=1)
        position_N = self._batch.token_keys_N(self._device)[1]
        segments = Segments(sequence_N, lengths_B, position_R=position_N, chunk_R=torch.zeros_like(sequence_N))
        token_N = torch.arange(sequence_N.numel(), device=self._device)
        return self._inputs(token_N, sequence_N, segments, stats_N, None)

    def _inputs(
        self, token_R: Tensor, sequence_R: Tensor, segments: Segments, stats: TokenStats, weights: TokenWeights | None
    ) -> LossInputs:
        logprobs, entropies, ref = self._old_logprobs_N, self._old_entropies_N, self._ref_logprobs_N
        if self._batch.update == 0 and entropies is not None:
            logprobs = entropies = None
        return LossInputs(
            advantage_R=self._advantages_B[sequence_R],
            old_logprob_R=stats.logprob_R.detach() if logprobs is None else logprobs[token_R],
            old_entropy_R=stats.entropy_R.detach() if entropies is None else entropies[token_R],
            rollout_logprob_R=self._rollout_logprobs_N[token_R],
            segments=segments,
            group_tokens_R=self._group_tokens_B[sequence_R],
            whole=self._whole,
            ref_logprob_R=None if ref is None else ref[token_R],
            weights=weights,
            noise_floor=self._noise_floor,
        )


def _tokens_of_prompts(batch: TrainBatch) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for rollout, tokens in zip(batch.rollouts, batch.response_lengths, strict=True):
        lengths[rollout.prompt_id] = lengths.get(rollout.prompt_id, 0) + tokens
    return lengths
