"""The interface between the training loop and the rollout side of a run.

`Driver` is used on ranks other than 0, which have no rollout side. Rank 0 uses `main_driver.MainDriver`, which owns the engine,
the grader, the prompts and the log. `opening.open_driver` returns the right one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tepo_megatron.checkpoint.saving import SavedCheckpoint
from tepo_megatron.controller.step_log import StepLog
from tepo_megatron.inference.engine import RolloutEngine
from tepo_megatron.observability.metrics import Metrics
from tepo_megatron.observability.timing import Clock
from tepo_megatron.types import Rollout


class NoTask:
    """The placeholder for the background work on ranks other than 0."""

    @property
    def done(self) -> bool:
        """Return whether the work has finished."""
        return True

    def wait(self) -> tuple[bool, Any]:
        """Return (False, None). Rank 0 broadcasts its own result instead."""
        return False, None


class Driver:
    """The driver of ranks other than 0: its methods do nothing."""

    def wait_engine(self) -> RolloutEngine | None:
        """Wait until the engine serves and return it; None on other ranks and without an engine."""
        return None

    @property
    def engine(self) -> RolloutEngine | None:
        """The engine, which may not serve yet; None on other ranks and without an engine."""
        return None

    def sleep_engine(self) -> None:
        """Wait until the engine serves and put it to sleep, so that its memory is free when the actor is built."""

    def log_message(self, text: str) -> None:
        """Log a message for the user."""

    def run_in_background(self, work: Callable[[], Any]) -> NoTask:
        """Start work that needs the engine in a background thread and return its handle."""
        return NoTask()

    def collect(self, step: int, clock: Clock) -> tuple[list[Rollout], Metrics] | None:
        """Return the step's graded rollouts and their metrics.

        Args:
            step: Number of the step.
            clock: Receives the seconds of sampling and grading.
        """
        return None

    def evaluate(self, step: int) -> None:
        """Record the accuracy of the weights of `step` on the held-out problems and benchmarks, if there are any."""

    @property
    def best_step(self) -> int | None:
        """The best evaluated step after step 0, whose checkpoint is kept; None without `checkpoint.keep_best`."""
        return None

    @property
    def out_of_patience(self) -> bool:
        """True if `evaluation.patience` evaluations came after the best one."""
        return False

    def log_step(self, step: int, log: StepLog, clock: Clock) -> None:
        """Write the step's record to the metrics.

        Args:
            step: Number of the step.
            log: The step's metrics.
            clock: The step's seconds by phase.
        """

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the rollout side that belongs into a checkpoint after `step`, as plain JSON."""
        return {}

    def resume(self, state: Mapping[str, Any] | None, passed_over: Sequence[str] = ()) -> None:
        """Restore the state of the rollout side.

        Args:
            state: Result of `state`, from a checkpoint. None: the run has no checkpoint and starts from the beginning.
            passed_over: For the log: the reasons why newer checkpoints were not used.

        Raises:
            ConfigError: The state belongs to a step after `training.steps`. The run's records are unchanged.
            DataError: The state belongs to other data. The run's records are unchanged.
        """

    def check_in_place(self) -> None:
        """Raise RunReplacedError if another run has taken over the run's folder."""

    def log_checkpoint(self, checkpoint: SavedCheckpoint | None) -> None:
        """Log a checkpoint that became complete. None: none did."""

    def finish(self, step: int) -> None:
        """Write the summary and the report after the last trained step."""
