"""Schedule sampling and weight updates: either in turn with training, or up to `max_staleness` steps ahead of it.

The rollouts of step t are started once weights of version t - 1 - max_staleness or newer are served, one step after the other.

    max_staleness, in_flight | new weights are served           | versions that sample the rollouts of step t
    0                        | after every step                 | t - 1
    1, finish                | between the rollouts of 2 steps  | t - 2 (the first: 0)
    k, finish                | when nothing is being sampled    | t - 1 - k or newer, depending on timing
    k, continue or restart   | after every step                 | t - 1 - k or newer, depending on timing

If trainer and engine share their devices (rollout.colocate), the engine sleeps while a step is trained and wakes when something
is to be sampled. Anything in between, such as a checkpoint, finds the trainer as training left it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tepo_megatron.config import Config
from tepo_megatron.controller.driver import Driver
from tepo_megatron.controller.gate import WeightsGate
from tepo_megatron.controller.memory_report import MemoryReport
from tepo_megatron.controller.placement import Disaggregated
from tepo_megatron.distributed.objects import broadcast_object
from tepo_megatron.distributed.parallel import ParallelDims
from tepo_megatron.observability.metrics import Metrics
from tepo_megatron.observability.timing import Clock
from tepo_megatron.types import Rollout
from tepo_megatron.utils.background import NoTask
from tepo_megatron.weight_sync.sync import NoSync, WeightSync


class Schedule:
    """The rollout side of the training loop. All ranks make the same calls.

    Attributes:
        ended: Whether training ends before the last step because evaluations stopped improving.
    """

    def __init__(
        self,
        cfg: Config,
        driver: Driver,
        sync: WeightSync | NoSync,
        groups: ParallelDims,
        first: int,
        turns: Disaggregated,
        memory: MemoryReport,
        gate: WeightsGate,
    ) -> None:
        """Serve the first weights, unless the devices are shared, and evaluate them if the run is new.

        Args:
            cfg: The run's config.
            driver: This rank's driver.
            sync: Delivers the actor's weights.
            groups: The mesh of this run.
            first: Step whose weights the actor has at the start.
            turns: Placement: whether trainer and engine share their devices.
            memory: Measures the memory of each phase.
            gate: Is notified of every delivery.
        """
        self._driver, self._sync, self._groups, self._turns, self._memory = driver, sync, groups, turns, memory
        self._gate = gate
        self._staleness, self._interrupts = cfg.rollout.max_staleness, cfg.rollout.in_flight != "finish"
        self._evaluates = cfg.data.eval is not None or bool(cfg.evaluation.benchmarks)
        self._evaluate_every = cfg.evaluation.every
        self._last = cfg.training.steps
        self._ahead: deque[tuple[NoTask, Clock]] = deque()  # rollouts of the next steps, finished or not
        self._begun = first  # last step whose rollouts were started
        self._trained = first  # version of the actor's weights
        self._version: int | None = None  # version of the served weights
        self.ended: bool = broadcast_object(driver.out_of_patience, groups.host)
        if not turns.shared:
            self._serve(Clock())
        if first == 0:
            self.evaluate(0)

    @property
    def trained(self) -> int:
        """The step whose weights the actor has."""
        return self._trained

    def take(self, step: int, clock: Clock) -> tuple[list[Rollout], Metrics]:
        """Return the graded rollouts to train on in `step`, and their metrics. Collective over all ranks.

        Args:
            step: Number of the step.
            clock: Receives the seconds of waiting, sampling, grading and weight updates.
        """
        if not self._ahead:
            self._serve(clock)
        self._begin_what_may_be()
        with clock.phase("wait"):
            working, sampling = self._ahead.popleft()
            taken: tuple[list[Rollout], Metrics] = self._wait(working)
        clock.seconds |= sampling.seconds
        self._memory.end_phase("generate")
        with clock.phase("sync"):
            self.train()
        if self._staleness:
            if not broadcast_object(any(not working.done for working, _ in self._ahead), self._groups.host):
                self._serve(clock)
                with clock.paused():
                    self.evaluate_if_due(step - 1)
            self._begin_what_may_be()
        return taken

    def train(self) -> None:
        """Make the actor ready to be trained, saved and exported."""
        self._turns.train()
        self._memory.begin_phase()

    def give(self, step: int, clock: Clock) -> None:
        """Have the engine serve the actor's weights, which are those of `step`.

        That happens at once, or later if something is being sampled that must finish first; with shared devices, when something
        is to be sampled with them.

        Args:
            step: The step that was trained.
            clock: Receives the seconds of the weight update.
        """
        self._memory.end_phase("train")
        self._trained = step
        if not self._turns.shared and (self._interrupts or not self._ahead):
            self._serve(clock)

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate the weights of `step` if they are served and an evaluation is due, after the sampling in progress.

        The weights of the last step are evaluated at the end of training.
        """
        due = self._evaluate_every > 0 and step % self._evaluate_every == 0
        served = self._trained if self._turns.shared else self._version
        if due and 0 < step < self._last and served == step:
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """Evaluate the served weights, those of `step`, on the held-out problems and benchmarks, if there are any."""
        if not self._evaluates:
            return
        self._serve(Clock())
        self._wait(self._driver.beside(lambda: self._driver.evaluate(step)))
        self.ended = broadcast_object(self._driver.out_of_patience, self._groups.host)

    def _begin_what_may_be(self) -> None:
        """Start rollouts as far ahead as the staleness of the served weights allows."""
        assert self._version is not None
        while self._begun < min(self._last, self._version + 1 + self._staleness):
            self._begun += 1
            sampling = Clock()
            self._ahead.append((self._driver.beside(self._collecting(self._begun, sampling)), sampling))

    def _collecting(self, step: int, clock: Clock) -> Callable[[], Any]:
        return lambda: self._driver.collect(step, clock)

    def _wait(self, working: NoTask) -> Any:
        """Return the work's result from rank 0 on every rank; meanwhile send the weights if a restarted server lacks them.

        The actor only has its newest weights. If rollouts are sampled ahead, the rest of them is therefore sampled with the
        newest.
        """
        while True:
            weights_wanted, made = broadcast_object(working.wait(), self._groups.host)
            if not weights_wanted:
                return made
            self._turns.repair(self._push)

    def _serve(self, clock: Clock) -> None:
        """Have the engine serve the actor's weights, unless it does."""
        if self._turns.engine_sleeps or self._version != self._trained:
            with clock.phase("sync"):
                self._turns.generate(self._push)
            self._memory.begin_phase()

    def _push(self) -> None:
        self._sync.push(version=self._trained)
        self._gate.delivered(self._trained)
        self._version = self._trained
