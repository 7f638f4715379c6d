"""Token statistics of a microbatch from the output of the model's last stage, and the sampling masks that they are taken under.

The masks are those of a microbatch, or those that the actor recomputes; both are measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.types import (
    NO_TOKEN,
    PackedMicrobatch,
    RecomputedMasks,
    SamplingMask,
    TokenStats,
    TrainBatch,
    Truncation,
)
from tepo_megatron.config import RolloutConfig
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.ops.output_layer import output_layer_stats
from tepo_megatron.ops.token_statistics.teacher import TeacherRows
from tepo_megatron.ops.vocab_parallel import token_stats


class OutputRows:
    """A forward pre-hook on a GPTModel's output layer that passes only the rows in `current`.

    Under sequence parallelism the rows are selected after a gather over tp, whose backward is a reduce-scatter. The layer's own
    gather and its own all-reduce of the input gradient are then switched off; with the latter on, the gradient would be summed
    twice over tp.
    """

    def __init__(self, gather: bool, own_weight: Tensor | None) -> None:
        self.current: Tensor | None = None  # int64, `rows_R` of the microbatch. It must be set before each forward pass.
        # With `keep_hidden`, the weight (tied or the layer's own) of the product that the layer skipped
        self.weight: Tensor | None = None
        self._gather, self._own_weight = gather, own_weight

    @classmethod
    def install(cls, output_layer: torch.nn.Module, keep_hidden: bool = False) -> "OutputRows":
        """Change the output layer of the last model chunk, and return its hook.

        `keep_hidden`: make the layer return the selected hidden states, [R, 1, H], instead of their logits, for code that fuses
        the product with the token statistics.
        """
        rows = cls(bool(output_layer.sequence_parallel), output_layer.weight)
        if rows._gather:
            output_layer.sequence_parallel = False
            output_layer.disable_grad_reduce = True
        output_layer.register_forward_pre_hook(rows._keep_rows, with_kwargs=True)
        if keep_hidden:
            output_layer.forward = rows._pass_on
        return rows

    def _keep_rows(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden, *rest = args  # [S, 1, H], and S / tp rows under sequence parallelism
        if self.current is None:
            raise RuntimeError("OutputRows.current was not set before the forward pass")
        if self._gather:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return (hidden.index_select(0, self.current), *rest), kwargs

    def _pass_on(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        self.weight = self._own_weight if weight is None else weight
        return hidden, None


Visit = Callable[[PackedMicrobatch, Tensor], None]  # is called with each microbatch and the output of the last stage


@dataclass(frozen=True)
class OutputStats:
    """Computes the token statistics of microbatches on the last pipeline stage."""

    temperature: float
    vocab_size: int
    groups: ParallelDims
    rows: OutputRows | None  # has the output layer's weight under training.logits_budget_mib
    budget_mib: int | None
    sums_hidden_gradient: bool  # see `output_layer_stats`

    def __call__(
        self,
        microbatch: PackedMicrobatch,
        output: Tensor,
        mask: SamplingMask | None = None,
        recompute: Truncation | None = None,
        teacher: TeacherRows | None = None,
    ) -> TokenStats:
        """Return the statistics of the microbatch's rows.

        Args:
            output: Logits [R, V / tp], or hidden states [R, H] under training.logits_budget_mib
            mask: The batch's sampling masks, on the device. None: the whole vocabulary.
            teacher: The teacher's rows, for the KL to it. Only under training.logits_budget_mib. None: no teacher.
        """
        labels_R, temperature, group = microbatch.labels_R, self.temperature, self.groups.tp.group
        mask_RK = None if mask is None else mask.rows(microbatch.token_R)
        if self.budget_mib is None:
            assert teacher is None, "the config is checked: a teacher needs hidden states"
            return token_stats(output, labels_R, temperature, group, self.vocab_size, mask_RK=mask_RK, recompute=recompute)
        assert self.rows is not None
        return output_layer_stats(
            output,
            self.rows.weight,
            labels_R,
            temperature,
            group,
            self.vocab_size,
            mask_RK=mask_RK,
            recompute=recompute,
            teacher=teacher,
            logits_budget=self.budget_mib * 2**20,
            sum_hidden_gradient=self.sums_hidden_gradient,
        )


# Shares of tokens, of a comparison with masks from the actor's own logits. See `docs/rollouts.md`.
TRUNCATION_METRICS = ("truncation/differs", "truncation/outside", "truncation/cut")


def truncation_of(cfg: RolloutConfig) -> Truncation | None:
    """Return the truncation of the distribution that is sampled from; None for none."""
    return Truncation(cfg.top_k, cfg.top_p, renormalizes=cfg.engine != "sglang") if cfg.truncates else None


def known_mask(batch: TrainBatch) -> SamplingMask | None:
    """Return the sampling masks of the response tokens: recomputed ones, else the engine's. None: not all are known."""
    if batch.recomputed_mask is not None:
        return batch.recomputed_mask
    masks = [r.sampling_mask for r in batch.rollouts if r.sampling_mask is not None]
    return SamplingMask.cat(masks) if masks and len(masks) == len(batch) else None


def device_mask(batch: TrainBatch, device: torch.device) -> SamplingMask | None:
    """Return the batch's sampling masks on a device; None if they are not known or sampling was not truncated."""
    mask = known_mask(batch)
    return None if mask is None else mask.to(device)


def mask_counts(recomputed: RecomputedMasks, mask_RK: Tensor | None) -> Tensor:
    """Return [3, 2] fp64: numerator and denominator of each of TRUNCATION_METRICS over the rows of a microbatch.

    `mask_RK`: the engine's masks. None: there are none, so nothing differs from them.
    """
    differs_R = torch.zeros_like(recomputed.outside_R) if mask_RK is None else recomputed.differ(mask_RK)
    flags = torch.stack((differs_R, recomputed.outside_R, recomputed.cut_R)).double()
    return torch.stack((flags.sum(1), torch.full_like(flags[:, 0], flags.size(1))), dim=1)


class MaskCollector:
    """Collects recomputed masks of N response tokens. Ranks of the last stage add those of their own microbatches."""

    def __init__(self, tokens: int, groups: ParallelDims) -> None:
        self._tokens, self._groups = tokens, groups
        self._counts = torch.zeros(3, 2, dtype=torch.float64, device=groups.device)
        self._parts: list[tuple[Tensor, Tensor]] = []  # (token_R, ids_RK)

    def add(self, microbatch: PackedMicrobatch, recomputed: RecomputedMasks) -> None:
        """Add the masks of one microbatch."""
        self._counts += mask_counts(recomputed, None)
        ids_RK = recomputed.ids_RK.sort(dim=1, descending=True).values
        widest = int((ids_RK != NO_TOKEN).sum(1).max()) if ids_RK.numel() else 0
        self._parts.append((microbatch.token_R, ids_RK[:, :widest].int()))

    def gather(self) -> tuple[SamplingMask | None, dict[str, float]]:
        """Return the masks of all tokens (on the host; None except on the last pipeline stage) and the metrics, on every rank.

        Collectives: on the last stage three all-reduces over dp x cp, the largest of [N, widest] int32; one broadcast over pp.
        """
        device, mask = self._groups.device, None
        if self._groups.is_last_stage:
            widest = torch.tensor(max((ids.size(1) for _, ids in self._parts), default=0), device=device)
            dist.all_reduce(widest, op=dist.ReduceOp.MAX, group=self._groups.dp_cp.group)
            ids_NK = torch.zeros(self._tokens, int(widest), dtype=torch.int32, device=device)
            for token_R, ids_RK in self._parts:
                ids_NK[token_R, : ids_RK.size(1)] = ids_RK - NO_TOKEN  # the ranks' parts are added, and 0 is no id
            dist.all_reduce(ids_NK, group=self._groups.dp_cp.group)
            dist.all_reduce(self._counts, group=self._groups.dp_cp.group)
            ids_NK += NO_TOKEN
            mask = SamplingMask.from_rows(ids_NK).to(torch.device("cpu"))
        pairs = self._groups.broadcast_from_last_stage(self._counts).tolist()
        values = {name: n / max(1.0, d) for name, (n, d) in zip(TRUNCATION_METRICS, pairs, strict=True)}
        del values["truncation/differs"]
        return mask, values


class MaskSource:
    """Attaches sampling masks to batches whose rollouts lack those of the engine. All ranks make the same calls."""

    def __init__(
        self,
        truncation: Truncation | None,
        stats: OutputStats,
        forward: Callable[[TrainBatch, Visit], None],
        groups: ParallelDims,
    ) -> None:
        self._truncation, self._stats, self._forward, self._groups = truncation, stats, forward, groups

    def attach(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        """Return the batch with its masks known on the last pipeline stage, and metrics, the same on every rank.

        Masks that the engine did not return are recomputed under the current weights, in a pass without gradient. Raises
        DataError if the rollouts were sampled with truncation and the config has none, or a mask is of another vocabulary.
        """
        self._check(batch)
        if self._truncation is None:
            return batch, {}
        metrics = {"truncation/recomputed": 0.0}
        if known_mask(batch) is None:
            masks = MaskCollector(batch.num_tokens, self._groups)

            def visit(microbatch: PackedMicrobatch, output: Tensor) -> None:
                recomputed = self._stats(microbatch, output, recompute=self._truncation).recomputed
                assert recomputed is not None, "recomputed masks were asked for"
                masks.add(microbatch, recomputed)

            self._forward(batch, visit)
            mask, measured = masks.gather()
            batch, metrics = replace(batch, recomputed_mask=mask), {"truncation/recomputed": 1.0} | measured
        return batch, metrics | {"truncation/kept_mean": self._mean_size(batch)}

    def _check(self, batch: TrainBatch) -> None:
        masks = [r.sampling_mask for r in batch.rollouts if r.sampling_mask is not None]
        if masks and self._truncation is None:
            raise DataError(
                "the rollouts have the sampling masks of truncated sampling, and this run has rollout.top_k=-1 and "
                "rollout.top_p=1; set them to the values of the run that recorded the rollouts"
            )
        largest = max((int(mask.ids_M.max()) for mask in masks if mask.ids_M.numel()), default=0)
        if largest >= self._stats.vocab_size:
            raise DataError(f"a sampling mask has id {largest}, and the model's vocabulary has {self._stats.vocab_size} tokens")

    def _mean_size(self, batch: TrainBatch) -> float:
        mean, mask = torch.zeros(1, dtype=torch.float64, device=self._groups.device), known_mask(batch)
        if mask is not None and batch.num_tokens:
            mean += mask.ids_M.numel() / batch.num_tokens
        return float(self._groups.broadcast_from_last_stage(mean))
