"""Schedule sampling and weight updates: either in turn with training, or up to `max_staleness` steps ahead of it.

The rollouts of step t are started once weights of version t - 1 - max_staleness or newer are served, one step after the other.

    max_staleness, in_flight | new weights are served           | versions that sample the rollouts of step t
    0                        | after every step                 | t - 1
    1, finish                | between the rollouts of 2 steps  | t - 2 (the first: 0)
    k, finish                | when nothing is being sampled    | t - 1 - k or newer, depending on timing
    k, continue or restart   | after every step                 | t - 1 - k or newer, depending on timing

With `training.stream` a step is trained while its last rollouts are still being sampled. The table holds for it, too: an engine
that needs the weights of version t - 1 meanwhile gets the copy that the gate keeps of them.

If trainer and engine share their devices (rollout.colocate), the engine sleeps while a step is trained and wakes when something
is to be sampled. Anything in between, such as a checkpoint, finds the trainer as training left it.

Ranks that were restarted next to a living service repeat the steps after the checkpoint with the rollouts of their former take.
Meanwhile the servers keep the newer weights that they have, and go on with what was being sampled.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from tepo_megatron.actor.actor import Actor
from tepo_megatron.base.save_requests import TraceRequest
from tepo_megatron.base.types import Rollout
from tepo_megatron.checkpoint.checkpoints import Checkpoints
from tepo_megatron.config import EvaluationConfig, RolloutConfig
from tepo_megatron.dist.objects import broadcast_object, broadcast_result
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.monitor.metrics import Metrics
from tepo_megatron.monitor.tracer import Clock, tracer
from tepo_megatron.service.batch_memory import BatchHeader
from tepo_megatron.service.messages import KeptRollouts
from tepo_megatron.sync.push import NoSync, WeightSync
from tepo_megatron.trainer.batch_receiver import BatchReceiver
from tepo_megatron.trainer.driver import Driver, ServiceTask
from tepo_megatron.trainer.gate import WeightsGate
from tepo_megatron.trainer.placement import Disaggregated, MemoryReport


class StartingPoint(NamedTuple):
    """Where this start of the ranks begins. `lacks_evaluation`: whether these weights have to be evaluated first."""

    step: int
    lacks_evaluation: bool
    kept: KeptRollouts | None


def starting_point(
    resumes: bool, checkpoints: Checkpoints, actor: Actor, driver: Driver, groups: ParallelDims
) -> StartingPoint:
    """Restore the newest checkpoint, if there is one and the run is resumed. All ranks call it.

    Collectives: one broadcast over the host group, and if the run is resumed, another one and those of the checkpoint.
    """
    if not broadcast_object(resumes, groups.host):
        return StartingPoint(0, lacks_evaluation=True, kept=None)
    newest = checkpoints.newest()
    state = None if newest is None else checkpoints.load(newest, actor)
    if state is not None:
        actor.noise_floor = state["noise_floor"]
    passed_over = [] if newest is None else newest.passed_over
    kept = broadcast_result(lambda: driver.resume(state, passed_over), groups.host)
    if state is None:
        return StartingPoint(0, lacks_evaluation=True, kept=kept)
    return StartingPoint(int(state["step"]), state.get("lacks_evaluation", False), kept)


class StopRequested(Exception):
    """The run is to save a checkpoint and end (`base/save_requests.py`). Every rank raises it at the same place."""


class RolloutPart(NamedTuple):
    """The rollouts that a step is trained on, or with `training.stream` those of one of its minibatches."""

    rollouts: list[Rollout]
    ids: tuple[int, ...]  # index of each rollout in the rollout batch; see `TrainBatch.ids_B`
    metrics: Metrics | None  # metrics of all that the step has sampled. None: the part is not the last one.

    @classmethod
    def whole(cls, rollouts: Sequence[Rollout]) -> Self:
        """Return the only part of a step with these rollouts and no metrics of sampling."""
        return cls(list(rollouts), tuple(range(len(rollouts))), Metrics())


class Schedule:
    """The rollout side of the training loop. All ranks make the same calls, `publish_first_weights` before all others.

    `ended`: whether training ends before the last step because evaluations stopped improving. Raises StopRequested from
    `next_parts` and the evaluations, which then have not finished. `stop` must be called next.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        evaluation: EvaluationConfig | None,
        steps: int,
        driver: Driver,
        sync: WeightSync | NoSync,
        gate: WeightsGate,
        placement: Disaggregated,
        memory: MemoryReport,
        batches: BatchReceiver,
        groups: ParallelDims,
        trained: int,
    ) -> None:
        self._driver, self._sync, self._gate, self._groups = driver, sync, gate, groups
        self._placement, self._memory, self._batches = placement, memory, batches
        self._staleness, self._interrupts = rollout.max_staleness, rollout.on_weight_update != "finish"
        self._evaluation, self._last = evaluation, steps
        self._ahead: deque[ServiceTask] = deque()  # rollouts of the next steps, finished or not
        self._started = trained  # last step whose rollouts were started
        self._served: int | None = None  # version of the served weights
        self._inherited = False  # whether ranks that failed have sent them
        self._evaluated: int | None = None  # last step whose weights were evaluated
        self._in_updates = False  # whether the actor may have taken updates since `trained`
        self.trained, self.ended, self.save_requested = trained, False, False
        self.trace_requested: TraceRequest | None = None

    def inherit(self, kept: KeptRollouts) -> None:
        """Go on with the rollouts that a living service has kept. Call it before `publish_first_weights`."""
        self._served, self._inherited = kept.version, kept.version is not None
        self._gate.begin_after(self.trained)
        while self._started < kept.started:
            self._started += 1
            self._ahead.append(self._driver.collect(self._started))

    @property
    def _repeats(self) -> bool:
        """Return whether the servers have the weights of a later step, which the ranks that failed have sent."""
        return self._served is not None and self._served > self.trained

    def publish_first_weights(self) -> None:
        """Have the engine serve the weights that the actor starts with, unless the devices are shared."""
        out_of_patience = broadcast_object(self._driver.out_of_patience, self._groups.host)
        self.ended = out_of_patience and not self._repeats  # a resumed run may have ended already
        self._note_version()
        if not self._placement.shared and (self._interrupts or not self._ahead):
            self._publish(Clock())

    def next_parts(self, step: int, clock: Clock) -> Iterator[RolloutPart]:
        """Yield the graded rollouts to train on in `step`, each part as soon as it is there. Collective over all ranks.

        There is one part, unless `training.stream` says otherwise. A part is to be trained on before the next one is asked for.
        """
        if not self._ahead or self._waits_asleep():
            self._publish(clock)
        self._start_rollouts()
        task, header = self._ahead.popleft(), None
        while header is None or not header.is_last:
            with clock.phase("wait"):
                header = self._wait(task)
                rollouts = self._batches.receive(header)
                self._driver.release(header.path)
            if header.is_last:
                self._all_received(step, header, clock)
            yield RolloutPart(rollouts, header.ids, Metrics(header.metrics) if header.is_last else None)
            self._in_updates = True

    def _all_received(self, step: int, header: BatchHeader, clock: Clock) -> None:
        """Prepare what comes after the sampling of a step, before the last of its rollouts are trained on."""
        clock.seconds |= header.seconds
        self._memory.end_phase("generate")
        with clock.phase("sync"):
            self.load_trainer()
        if self._staleness:
            if not broadcast_object(any(not task.done for task in self._ahead), self._groups.host):
                self._publish(clock)
                with clock.paused():
                    self.evaluate_if_due(step - 1)
            self._start_rollouts()

    def load_trainer(self) -> None:
        """Make the actor ready to be trained, saved and exported: an evaluation may have given the device to the engine."""
        self._placement.train()
        self._memory.begin_phase()

    def stop(self) -> None:
        """Make the actor ready to be saved. What is being sampled or evaluated on shared devices is given up."""
        self._placement.train(abort=True)

    def publish_weights(self, step: int, clock: Clock) -> None:
        """Have the engine serve the actor's weights, which are those of `step`."""
        self._memory.end_phase("train")
        self._batches.release()
        self.trained, self._in_updates = step, False
        self._note_version()
        if not self._placement.shared and (self._interrupts or not self._ahead):
            self._publish(clock)

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate the weights of `step` if they are served and an evaluation is due, after the sampling in progress."""
        served = self.trained if self._placement.shared else self._served
        if self._is_due(step) and served == step:
            self.evaluate(step)

    def _is_due(self, step: int) -> bool:
        every = 0 if self._evaluation is None else self._evaluation.every
        return every > 0 and step % every == 0 and 0 < step < self._last

    @property
    def lacks_evaluation(self) -> bool:
        """Return whether an evaluation of the actor's weights is due and was not made, so that a resumed run has to make it."""
        return self._is_due(self.trained) and self._evaluated != self.trained

    def evaluate(self, step: int) -> None:
        """Evaluate the served weights, those of `step`, on the held-out problems and benchmarks, if there are any."""
        if self._evaluation is None or self._repeats:  # the ranks that failed have evaluated what was due
            return
        self._publish(Clock())
        self._wait(self._driver.evaluate(step))
        self._evaluated = step
        self.ended = broadcast_object(self._driver.out_of_patience, self._groups.host)

    def _start_rollouts(self) -> None:
        """Start rollouts as far ahead as the staleness of the served weights allows, unless the engine sleeps."""
        assert self._served is not None
        while not self._placement.engine_sleeps and self._started < min(self._last, self._served + 1 + self._staleness):
            self._started += 1
            self._ahead.append(self._driver.collect(self._started))

    def _wait(self, task: ServiceTask) -> Any:
        """Return the task's result, or its next minibatch, from rank 0, or raise its error, on every rank."""
        while True:
            # a checkpoint is a whole step: between its updates the run does not end
            waited = broadcast_result(partial(task.wait, not self._in_updates), self._groups.host)
            self.save_requested |= waited.save
            self.trace_requested = waited.trace or self.trace_requested
            if waited.event == "stop":
                raise StopRequested
            if waited.event in ("done", "minibatch"):
                return waited.result
            self._placement.repair(self._push)

    def _waits_asleep(self) -> bool:
        """Return whether kept rollouts of the next step are incomplete and need the engine, which sleeps."""
        return self._placement.engine_sleeps and broadcast_object(not self._ahead[0].done, self._groups.host)

    def _note_version(self) -> None:
        """Have the gate keep the actor's weights if tokens that were sampled with their former take may be trained on."""
        if self._served is not None and self._served >= self.trained:
            self._gate.delivered(self.trained)

    def _publish(self, clock: Clock) -> None:
        """Have the engine serve the actor's weights, unless it serves these, or those of a later step that was taken before."""
        if self._repeats:
            return
        if self._placement.engine_sleeps or self._served != self.trained or self._inherited:
            with clock.phase("sync"):
                self._placement.generate(self._push)
            self._memory.begin_phase()

    def _push(self) -> None:
        with self._gate.weights_of(self.trained) if self._in_updates else contextlib.nullcontext():
            self._sync.push(version=self.trained)
            tracer.instant(f"weights of version {self.trained} are served", "main thread")
        self._gate.delivered(self.trained)
        self._served, self._inherited = self.trained, False
