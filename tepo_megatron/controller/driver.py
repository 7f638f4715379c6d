"""The interface between the training loop and the rollout side of a run.

`Driver` is used on ranks other than 0, which have no rollout side. Rank 0 uses `ServiceDriver`: its methods are calls of the
rollout service (`service.py`), in which `main_driver.MainDriver` makes them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import Config
from tepo_megatron.controller.messages import KeptRollouts, Waited
from tepo_megatron.controller.service_client import PendingAnswer, ServiceClient, ServiceEngine
from tepo_megatron.controller.step_log import StepLog
from tepo_megatron.observability.timing import Clock

if TYPE_CHECKING:
    from tepo_megatron.checkpoint.saving import SavedCheckpoint


class NoTask:
    """The placeholder for the service's work on ranks other than 0."""

    @property
    def done(self) -> bool:
        """Return whether the work has finished."""
        return True

    def wait(self, may_stop: bool = True) -> Waited:
        """Return that the work is done. Rank 0 broadcasts its own result instead."""
        return Waited("done")


class Driver:
    """The driver of ranks other than 0: its methods do nothing."""

    def wait_engine(self) -> None:
        """Wait until the engine serves, if there is one."""

    @property
    def engine(self) -> ServiceEngine | None:
        """The engine, which may not serve yet; None on other ranks and without an engine."""
        return None

    def sleep_engine(self) -> None:
        """Wait until the engine serves and put it to sleep, so that its memory is free when the actor is built."""

    def log_message(self, text: str) -> None:
        """Log a message for the user."""

    def collect(self, step: int) -> NoTask:
        """Start to sample and grade the rollouts of a step; the task's result is their `BatchHeader`."""
        return NoTask()

    def evaluate(self, step: int) -> NoTask:
        """Start to record the accuracy of the weights of `step` on the held-out problems and benchmarks, if there are any."""
        return NoTask()

    def release(self, path: str) -> None:
        """Let the service close the file of a batch that all ranks have read."""

    @property
    def best_step(self) -> int | None:
        """The best evaluated step after step 0, whose checkpoint is kept; None without `checkpoint.keep_best`."""
        return None

    @property
    def out_of_patience(self) -> bool:
        """True if `evaluation.patience` evaluations came after the best one."""
        return False

    def log_step(self, step: int, log: StepLog, clock: Clock) -> None:
        """Write the step's record to the metrics."""

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the rollout side that belongs into a checkpoint after `step`, as plain JSON."""
        return {}

    def resume(self, state: Mapping[str, Any] | None, passed_over: Sequence[str] = ()) -> KeptRollouts | None:
        """Restore the state of the rollout side.

        `state`: result of `state`, from a checkpoint. None: the run has no checkpoint and starts from the beginning. Returns
        the rollouts after the checkpoint that a service has kept, if it has served ranks before; else None.
        """
        return None

    def check_in_place(self) -> None:
        """Raise RunReplacedError if another run has taken over the run's folder."""

    def log_checkpoint(self, checkpoint: "SavedCheckpoint | None") -> None:
        """Log a checkpoint that became complete, and release what is kept of its steps. None: none did."""

    def finish(self, step: int, on_request: bool = False) -> None:
        """Write the summary and the report after the last trained step."""


class ServiceTask(NoTask):
    """Work of the service's rollout thread."""

    def __init__(self, client: ServiceClient, number: int) -> None:
        self._client, self._number = client, number

    @property
    def done(self) -> bool:
        return bool(self._client.call("done", self._number))

    def wait(self, may_stop: bool = True) -> Waited:
        """Wait until the work or a minibatch of it is done, the engine asks for weights, or the run is to end.

        Errors of the work are raised again.
        """
        waited: Waited = self._client.call("wait", self._number, may_stop)
        return waited


class ServiceDriver(Driver):
    """The driver of rank 0. Every method raises the errors of the service, and RolloutError if the service is lost."""

    def __init__(self, client: ServiceClient, cfg: Config) -> None:
        self._client = client
        self._engine = ServiceEngine(client) if cfg.rollout.replay is None else None

    @property
    def engine(self) -> ServiceEngine | None:
        return self._engine

    def wait_engine(self) -> None:
        self._client.call("wait_engine")

    def sleep_engine(self) -> None:
        self._client.call("sleep_engine")

    def log_message(self, text: str) -> None:
        self._client.call("log_message", text)

    def collect(self, step: int) -> ServiceTask:
        return self._start("collect", step)

    def evaluate(self, step: int) -> ServiceTask:
        return self._start("evaluate", step)

    def _start(self, name: str, step: int) -> ServiceTask:
        pending: PendingAnswer = self._client.begin(name, step)
        pending.result()
        return ServiceTask(self._client, pending.number)

    def release(self, path: str) -> None:
        self._client.call("release", path)

    @property
    def best_step(self) -> int | None:
        best: int | None = self._client.call("best_step")
        return best

    @property
    def out_of_patience(self) -> bool:
        return bool(self._client.call("out_of_patience"))

    def log_step(self, step: int, log: StepLog, clock: Clock) -> None:
        self._client.call("log_step", step, log.record(clock))

    def state(self, step: int) -> dict[str, Any]:
        state: dict[str, Any] = self._client.call("state", step)
        return state

    def resume(self, state: Mapping[str, Any] | None, passed_over: Sequence[str] = ()) -> KeptRollouts | None:
        try:
            kept: KeptRollouts | None = self._client.call("resume", state, passed_over)
        except Exception:
            self._client.close()  # where the ranks are restarted, a new service can go on from any checkpoint
            raise
        return kept

    def check_in_place(self) -> None:
        self._client.call("check_in_place")

    def log_checkpoint(self, checkpoint: "SavedCheckpoint | None") -> None:
        if checkpoint is not None:
            self._client.call("saved", checkpoint.step)
            self.log_message(
                f"checkpoint of step {checkpoint.step}: {checkpoint.size / 2**20:.0f} MiB complete after "
                f"{checkpoint.seconds:.1f} s, of which training waited {checkpoint.blocked_seconds:.2f} s"
            )

    def finish(self, step: int, on_request: bool = False) -> None:
        self._client.call("finish", step, on_request)
