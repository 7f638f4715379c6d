"""Learn from the rollouts of one step: old statistics, reference log-probs, and one update for each minibatch.

`training.stream` decides what a step is given, and where the old statistics come from:

    training.stream | the parts of a step                | old statistics of a part
    off             | one: the whole rollout batch       | a pass before the first update
    prompt, arrival | the minibatches of the first       | the first part: those of its own update; the others: a pass with
                    | epoch, each as soon as it is there | the weights at the start of the batch, which the gate has kept
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from tepo_megatron.actor.accumulator import UpdateResult, mismatch, reference_divergence
from tepo_megatron.actor.actor import Actor
from tepo_megatron.actor.recorder import TokenRecorder
from tepo_megatron.base.hardware import GPUS, card_of
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.types import TrainBatch
from tepo_megatron.base.types.batch import join_minibatches
from tepo_megatron.config import TrainingConfig
from tepo_megatron.dist.platform import device_name
from tepo_megatron.losses import Objective
from tepo_megatron.losses.advantages import check_some_are_whole, group_advantages, penalized, without_truncated
from tepo_megatron.models.ops import forward_operations
from tepo_megatron.monitor.tracer import Clock, tracer
from tepo_megatron.trainer.driver import StepLog
from tepo_megatron.trainer.gate import WeightsGate
from tepo_megatron.trainer.schedule import RolloutPart


def learn(
    parts: Iterable[RolloutPart],
    step: int,
    actor: Actor,
    objective: Objective,
    training: TrainingConfig,
    log: StepLog,
    clock: Clock,
    gate: WeightsGate,
    *,
    measures_noise: bool = False,
    recorder: TokenRecorder | None = None,
) -> None:
    """Make all updates of one rollout batch: old statistics, reference log-probs, then one update per minibatch.

    Every rank calls it after `actor.start_step(step)`. When it returns, the parameters are gathered.

    Raises:
        SyncError: The engine's log-probs differ from the actor's by more than `sync.max_logprob_diff`.
        NumericalError: A loss or a gradient norm is not finite.
        DataError: `objective.mask_truncated` leaves nothing to learn from.
    """
    updates = BatchUpdates(step, actor, objective, training, log, clock, gate, measures_noise, recorder)
    gate.start_step(step)
    for part in parts:
        log.receive(sum(r.token_ids_L.numel() for r in part.rollouts), part.metrics)
        if part.rollouts:
            updates.take(part)
    updates.finish()
    log.note(gate.values())
    log.note({"mfu": updates.utilization()})


@dataclass
class BatchUpdates:
    """The updates of one rollout batch. The first fields are arguments of `learn`."""

    step: int
    actor: Actor
    objective: Objective
    training: TrainingConfig
    log: StepLog
    clock: Clock
    gate: WeightsGate
    measures_noise: bool
    recorder: TokenRecorder | None
    streamed: list[TrainBatch] = field(default_factory=list)
    whole: TrainBatch | None = None
    operations: float = 0.0  # of all passes so far, on all ranks; 0 on devices whose peak is not known

    def utilization(self) -> float | None:
        """Return the step's MFU: operations / (seconds of these phases * ranks * the datasheet's BF16 peak)."""
        seconds = sum(self.clock.seconds.get(phase, 0.0) for phase in ("old_stats", "reference", "update"))
        rate = self._peak * self.actor.groups.world_size
        return self.operations / (seconds * rate) if self.operations else None

    @property
    def _peak(self) -> float:
        card = card_of(device_name(self.actor.groups.device))
        return 0.0 if card is None else GPUS[card].peak[2]

    def count(self, batch: TrainBatch, passes: int) -> None:
        """Add the operations of passes over a batch; forward and backward are three passes, and recomputation is none."""
        if self._peak:
            lengths = [(r.token_ids_L.numel(), int(r.response_mask_L.sum())) for r in batch.rollouts]
            self.operations += passes * (forward_operations(self.actor.arch, lengths) or 0.0)

    @property
    def _streams(self) -> bool:
        return self.training.streams

    def take(self, part: RolloutPart) -> None:
        """Prepare a part, and update with it if it is a minibatch of its own."""
        if self.recorder is not None and not self.streamed:
            self.recorder.clear()
        rollouts = without_truncated(part.rollouts) if self.objective.mask_truncated else part.rollouts
        advantages_B = group_advantages(part.rollouts, self.objective.advantage)
        ids_B = torch.tensor(part.ids, dtype=torch.int64)
        batch = replace(TrainBatch.build(rollouts, advantages_B), update=len(self.streamed), ids_B=ids_B)
        with self.clock.phase("old_stats"):
            at_start = self.gate.weights_of(self.step - 1) if batch.update else contextlib.nullcontext()
            with at_start:
                batch = self._with_old_statistics(batch)
        batch = self._with_reference(batch)
        if not self._streams:
            self.whole = batch
            return
        with self.clock.phase("update"):
            measured = self._update(batch).measured
        self.streamed.append(batch if measured is None or self.training.old_logprobs == "rollout" else measured)

    def finish(self) -> None:
        """Make the updates that are left, once all parts are there."""
        if self.streamed:
            self.whole = join_minibatches(self.streamed)
        if self.whole is None:
            return
        if self.objective.mask_truncated:
            check_some_are_whole(self.whole.rollouts)
        training, taken = self.training, len(self.streamed)
        if self._streams and self.whole.old_entropies_N is not None:
            self.log.note(mismatch(self.whole, self.actor.groups))
        made, seed = int(self._streams), derive_seed(self.actor.cfg.seed, "minibatches", self.step)
        with self.clock.phase("update"):
            if self.recorder is not None:
                left = (training.epochs - made) * self.whole.updates(1, training.minibatch_prompts)
                self.recorder.record(self.whole, taken + left)
            for minibatch in self.whole.epochs(training.epochs, training.minibatch_prompts, seed, made, taken):
                self._update(minibatch)
            self.actor.finish_step()

    def _update(self, minibatch: TrainBatch) -> UpdateResult:
        """Take one optimizer step. Without an old pass, the first one measures what an old pass would."""
        prompts = {rollout.prompt_id for rollout in minibatch.rollouts} if self.actor.groups.is_main and tracer.active else ()
        with tracer.span("minibatch", flows=sorted(prompts), rollouts=len(minibatch.rollouts)):
            result = self.actor.update(minibatch, self.objective, self.recorder)
        self.count(minibatch, passes=3)
        self.log.add(result)
        if result.mismatch is not None and result.measured is not None:
            if not self._streams or self.training.old_logprobs == "rollout":
                self.log.note(result.mismatch)
            self.gate.with_old_stats(result.measured, self.step)
        return result

    def _with_old_statistics(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with sampling masks and the statistics of the old policy. The actor has the weights of its start."""
        batch, metrics = self.actor.masks.attach(batch)
        self.log.note(metrics)
        self.gate.before_updates(batch, self.step)
        if self.training.old_logprobs == "rollout":
            return replace(batch, old_logprobs_N=batch.rollout_logprobs_N)
        if not self._needs_old_pass(batch):
            return batch
        batch = self.actor.attach_old_stats(batch)
        self.count(batch, passes=1)
        if not self._streams:
            self.log.note(mismatch(batch, self.actor.groups))
        self.gate.with_old_stats(batch, self.step)
        if self.measures_noise:
            self.log.note({"tepo/entropy_noise_floor": self.actor.measure_noise(batch)})
            self.measures_noise = False
        return batch

    def _needs_old_pass(self, batch: TrainBatch) -> bool:
        """Return whether old statistics need a forward pass of their own.

        They need none in a batch of one update and in the first streamed minibatch, whose forward passes yield them, unless
        something uses them before.
        """
        objective, training = self.objective, self.training
        if objective.needs_batch_statistics or (objective.ref_kl is not None and objective.ref_kl.where == "reward"):
            return True
        return batch.update > 0 or (not self._streams and batch.updates(training.epochs, training.minibatch_prompts) > 1)

    def _with_reference(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with what the objective needs of the reference policy; unchanged if it needs nothing."""
        if (penalty := self.objective.ref_kl) is None or self.objective.needs_teacher:
            return batch
        with self.clock.phase("reference"):
            batch = self.actor.attach_ref_logprobs(batch)
        self.count(batch, passes=1)
        if penalty.where == "loss":
            return batch
        divergence_B = reference_divergence(batch, penalty.estimator, self.actor.groups)
        self.log.note({"reward/ref_kl": float(divergence_B.mean())})
        rollouts = penalized(batch.rollouts, penalty.beta * divergence_B)
        return replace(batch, rollouts=rollouts, advantages_B=group_advantages(rollouts, self.objective.advantage))
