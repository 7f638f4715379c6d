"""Divide a batch into microbatches over the data-parallel ranks, and pack those of this rank."""

from collections.abc import Callable, Sequence

from tepo_megatron.base.types import PackedMicrobatch, TrainBatch
from tepo_megatron.config import TrainingConfig
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.packing import pack
from tepo_megatron.ops.pipeline_time import Pipeline
from tepo_megatron.ops.planning import Plan, plan_metrics, plan_microbatches
from tepo_megatron.ops.shared_prompts import LEAST_SAVED, PrefixGroups


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
