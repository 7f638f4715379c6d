"""The actor: old statistics, updates, and the weights that leave it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from tepo_megatron.actor import build
from tepo_megatron.actor.output_rows import OutputRows
from tepo_megatron.actor.schedule import Schedule
from tepo_megatron.config import Config
from tepo_megatron.errors import NumericalError
from tepo_megatron.losses.objective import LossInputs, Objective
from tepo_megatron.metrics import Pair
from tepo_megatron.ops.packing import Alignment, pack, plan_microbatches
from tepo_megatron.ops.segments import Segments
from tepo_megatron.ops.vocab_parallel import token_stats
from tepo_megatron.parallel import Groups
from tepo_megatron.types import Denominators, PackedMicrobatch, TokenStats, TrainBatch
from tepo_megatron.weights.families import find_family, read_config
from tepo_megatron.weights.gather import bind, export_hf, load_hf
from tepo_megatron.weights.hf_io import HfReader


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step reports, the same on every rank.

    metrics: name -> (numerator, denominator); ratio_B: mean importance ratio of each sequence; update: its place in the
    rollout batch.
    """

    metrics: dict[str, Pair]
    ratio_B: Tensor
    update: int


@dataclass
class _Tally:
    """Sums over the microbatches of one update, on the last stage."""

    ratio_B: Tensor
    pairs: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, numerator: Tensor, denominator: Tensor) -> None:
        pair = torch.stack((numerator.double(), denominator.double()))
        self.pairs[name] = self.pairs[name] + pair if name in self.pairs else pair


class Actor:
    """The policy on this rank's part of the mesh."""

    def __init__(self, cfg: Config, groups: Groups) -> None:
        hf_config = read_config(cfg.model.path)
        self.family = find_family(hf_config)
        self.arch = self.family.architecture(hf_config)
        self.cfg, self.groups = cfg, groups
        self.config = build.transformer_config(self.arch, cfg.model, cfg.parallel, groups.device)
        chunks = build.build_chunks(self.config, self.arch, cfg.model, groups)
        self.bindings = bind(chunks, self.family, self.arch)
        # before the optimizer, which copies its fp32 masters from the weights
        load_hf(self.bindings, HfReader(cfg.model.path), self.family, self.arch, groups.tp)
        rows = OutputRows(chunks[-1].output_layer) if groups.is_last_stage else None
        self.chunks = build.wrap_ddp(self.config, chunks)
        self.optimizer, self.scheduler = build.build_optimizer(cfg.optimizer, cfg.model, self.chunks)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self._schedule = Schedule(self.chunks, rows, groups)
        self._step = 0
        self._alignment = Alignment(cp=groups.cp.size, total=groups.tp.size if cfg.parallel.sequence_parallel else 1)

    def attach_old_stats(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the log-probs and entropies of the current weights, valid on the last pipeline stage.

        Collectives beyond the forward pass: one all-reduce of [N, 2] over dp x cp on the last stage (each token is computed
        by one rank; the others add 0).
        """
        old_N = torch.zeros(batch.num_tokens, 2, device=self.groups.device)

        def visit(microbatch: PackedMicrobatch, logits: Tensor) -> None:
            stats = self._stats(microbatch, logits)
            old_N[microbatch.token_R] = torch.stack((stats.logprob_R, stats.entropy_R), dim=1)

        self._schedule.forward(self._microbatches(batch), visit)
        if self.groups.is_last_stage:
            dist.all_reduce(old_N, group=self.groups.dp_cp.group)
        return batch.with_old_stats(old_N[:, 0], old_N[:, 1])

    def mismatch(self, batch: TrainBatch) -> dict[str, float]:
        """How far the engine's log-probs lie from the actor's, and the actor's entropy; the same on every rank.

        Returns `rollout/logprob_diff_mean`, `rollout/logprob_diff_max` (nats) and `actor/entropy` (nats per response token).
        """
        assert batch.old_logprobs_N is not None and batch.old_entropies_N is not None, "attach_old_stats comes first"
        diff_N = (batch.rollout_logprobs_N.to(self.groups.device) - batch.old_logprobs_N).abs()
        values = torch.stack((diff_N.mean(), diff_N.max(), batch.old_entropies_N.mean())).double()
        mean, largest, entropy = self.groups.broadcast_from_last_stage(values).tolist()
        return {
            "rollout/logprob_diff_mean": mean,
            "rollout/logprob_diff_max": largest,
            "actor/entropy": entropy,
        }

    def start_step(self, step: int) -> None:
        """Advance the learning-rate schedule by one rollout batch, the run's `step`-th; called before its first update."""
        self._step = step
        self.scheduler.step(increment=1)

    def update(self, batch: TrainBatch, objective: Objective) -> UpdateResult:
        """One optimizer step on a minibatch.

        Raises NumericalError, on every rank, for a loss (before the step) or a gradient norm that is not finite.
        """
        tally = self.backward(batch, objective)
        result = self._reduce(tally, objective, batch)
        loss, _ = result.metrics["loss/total"]
        if not math.isfinite(loss):
            raise NumericalError(
                f"loss is {loss} in step {self._step}, update {batch.update}; no weight was changed by it. Lower optimizer.lr, "
                f"or look for infinite rewards"
            )
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):
            raise NumericalError(
                f"gradient norm is {grad_norm} in step {self._step}, update {batch.update}; lower optimizer.lr"
            )
        result.metrics["actor/grad_norm"] = (float(grad_norm), 1.0)
        return result

    def backward(self, batch: TrainBatch, objective: Objective) -> _Tally:
        """Gradients of the objective on a minibatch, reduced over all ranks, left in `main_grad`."""
        assert batch.old_logprobs_N is not None and batch.old_entropies_N is not None, "attach_old_stats comes first"
        device = self.groups.device
        whole = Denominators(
            tokens=torch.tensor(float(batch.num_tokens), device=device),
            sequences=torch.tensor(float(len(batch)), device=device),
        )
        advantages_B = batch.advantages_B.to(device)
        old_logprobs_N, old_entropies_N = batch.old_logprobs_N.to(device), batch.old_entropies_N.to(device)
        tally = _Tally(torch.zeros(len(batch), dtype=torch.float64, device=device))

        def loss(microbatch: PackedMicrobatch, logits: Tensor) -> Tensor:
            segments = Segments(microbatch.sequence_R, microbatch.lengths_G, self.groups.cp.group)
            inputs = LossInputs(
                advantage_R=segments.spread(advantages_B[microbatch.sequences_G]),
                old_logprob_R=old_logprobs_N[microbatch.token_R],
                old_entropy_R=old_entropies_N[microbatch.token_R],
                segments=segments,
                whole=whole,
            )
            out = objective(self._stats(microbatch, logits), inputs)
            for name, (numerator, denominator) in out.metrics.items():
                tally.add(name, numerator, denominator)
            mean_R = (out.ratio_R / segments.spread(microbatch.lengths_G)).double()
            tally.ratio_B.index_add_(0, microbatch.sequences_G[microbatch.sequence_R], mean_R)
            return out.loss

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._schedule.forward_backward(self._microbatches(batch), loss, batch.num_tokens)
        return tally

    def export_hf(self, out: Path) -> None:
        """Write the current weights as a Hugging Face directory (all ranks call it)."""
        export_hf(self.bindings, self.arch, self.groups, Path(self.cfg.model.path), out)

    def _microbatches(self, batch: TrainBatch) -> list[PackedMicrobatch]:
        """This rank's packed microbatches; under virtual pipelining their number is a multiple of pp."""
        plan = plan_microbatches(
            batch.lengths,
            self.groups.dp.size,
            self.cfg.training.max_tokens_per_microbatch,
            self._alignment,
            multiple_of=self.groups.pp.size if self.groups.vpp > 1 else 1,
        )
        ids = [r.token_ids_L for r in batch.rollouts]
        masks = [r.response_mask_L for r in batch.rollouts]
        return [
            pack(ids, masks, batch.first_tokens, indices, self._alignment, self.groups.cp.rank)
            for indices in plan[self.groups.dp.rank]
        ]

    def _stats(self, microbatch: PackedMicrobatch, logits: Tensor) -> TokenStats:
        temperature = self.cfg.rollout.temperature
        return token_stats(logits, microbatch.labels_R, temperature, self.groups.tp.group, self.arch.vocab_size)

    def _reduce(self, tally: _Tally, objective: Objective, batch: TrainBatch) -> UpdateResult:
        """Sum the tally over dp x cp and tell every stage. Collectives: one all-reduce, one broadcast over pp."""
        names = objective.metric_names
        assert tally.pairs.keys() <= set(names), f"metrics {tally.pairs.keys()} are not all in metric_names {names}"
        zero = torch.zeros(2, dtype=torch.float64, device=self.groups.device)
        flat = torch.cat([*(tally.pairs.get(name, zero) for name in names), tally.ratio_B])
        if self.groups.is_last_stage:
            dist.all_reduce(flat, group=self.groups.dp_cp.group)
        flat = self.groups.broadcast_from_last_stage(flat).cpu()
        pairs = flat[: 2 * len(names)].view(-1, 2).tolist()
        return UpdateResult(
            {name: (n, d) for name, (n, d) in zip(names, pairs, strict=True)},
            flat[2 * len(names) :],
            batch.update,
        )
