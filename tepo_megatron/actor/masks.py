"""Sampling masks in the actor: those of a microbatch, those that it recomputes, and what is measured of both."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.actor.output_stats import OutputStats, Visit
from tepo_megatron.base.errors import DataError
from tepo_megatron.base.types import NO_TOKEN, PackedMicrobatch, RecomputedMasks, SamplingMask, TrainBatch, Truncation
from tepo_megatron.config import RolloutConfig
from tepo_megatron.dist.parallel import ParallelDims

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
