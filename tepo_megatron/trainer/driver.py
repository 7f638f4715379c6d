"""The interface between the training loop and the rollout side of a run.

The methods of rank 0's `Driver` are calls of the rollout service (`service/`), in which `main_driver.MainDriver` makes them.
On other ranks, which have no rollout side, they do nothing.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tepo_megatron.config import Config
from tepo_megatron.monitor.tracer import Clock
from tepo_megatron.service.messages import KeptRollouts, Waited
from tepo_megatron.trainer.service_client import PendingAnswer, ServiceClient, ServiceEngine
from tepo_megatron.trainer.step_log import StepLog

if TYPE_CHECKING:
    from tepo_megatron.checkpoint.saving import SavedCheckpoint


class ServiceTask:
    """Work of the service's rollout thread. On ranks other than 0 it is done."""

    def __init__(self, client: ServiceClient | None = None, number: int = 0) -> None:
        self._client, self._number = client, number

    @property
    def done(self) -> bool:
        """Return whether the work has finished."""
        return self._client is None or bool(self._client.call("done", self._number))

    def wait(self, may_stop: bool = True) -> Waited:
        """Wait until the work or a minibatch of it is done, the engine asks for weights, or the run is to end.

        Errors of the work are raised again. Rank 0 broadcasts its own result to the other ranks.
        """
        if self._client is None:
            return Waited("done")
        waited: Waited = self._client.call("wait", self._number, may_stop)
        return waited


class Driver:
    """The rollout side of a run. Every method raises the errors of the service, and RolloutError if the service is lost.

    `engine`: the engine, which may not serve yet; None on other ranks and without an engine.
    """

    def __init__(self, client: ServiceClient | None, cfg: Config) -> None:
        self._client = client
        self.engine = None if client is None or cfg.rollout.replay is not None else ServiceEngine(client)

    def _call(self, name: str, *args: Any) -> Any:
        return None if self._client is None else self._client.call(name, *args)

    def wait_engine(self) -> None:
        """Wait until the engine serves, if there is one."""
        self._call("wait_engine")

    def sleep_engine(self) -> None:
        """Wait until the engine serves and put it to sleep, so that its memory is free when the actor is built."""
        self._call("sleep_engine")

    def log_message(self, text: str) -> None:
        """Log a message for the user."""
        self._call("log.message", text)

    def collect(self, step: int) -> ServiceTask:
        """Start to sample and grade the rollouts of a step; the task's result is their `BatchHeader`."""
        return self._start("collect", step)

    def evaluate(self, step: int) -> ServiceTask:
        """Start to record the accuracy of the weights of `step` on the held-out problems and benchmarks, if there are any."""
        return self._start("evaluate", step)

    def _start(self, name: str, step: int) -> ServiceTask:
        if self._client is None:
            return ServiceTask()
        pending: PendingAnswer = self._client.begin(name, step)
        pending.result()
        return ServiceTask(self._client, pending.number)

    def release(self, path: str) -> None:
        """Let the service close the file of a batch that all ranks have read."""
        self._call("kept.release_batch", path)

    @property
    def best_step(self) -> int | None:
        """The best evaluated step after step 0, whose checkpoint is kept; None without `checkpoint.keep_best`."""
        best: int | None = self._call("evaluations.best_step")
        return best

    @property
    def out_of_patience(self) -> bool:
        """True if `evaluation.patience` evaluations came after the best one."""
        return bool(self._call("evaluations.out_of_patience"))

    def log_step(self, step: int, log: StepLog, clock: Clock) -> None:
        """Write the step's record to the metrics."""
        if self._client is not None:
            self._client.call("log.write", step, log.record(clock))

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the rollout side that belongs into a checkpoint after `step`, as plain JSON."""
        return self._call("state", step) or {}

    def resume(self, state: Mapping[str, Any] | None, passed_over: Sequence[str] = ()) -> KeptRollouts | None:
        """Restore the state of the rollout side.

        `state`: result of `state`, from a checkpoint. None: the run has no checkpoint and starts from the beginning. Returns
        the rollouts after the checkpoint that a service has kept, if it has served ranks before; else None.
        """
        try:
            kept: KeptRollouts | None = self._call("resume", state, passed_over)
        except Exception:
            if self._client is not None:
                self._client.close()  # where the ranks are restarted, a new service can go on from any checkpoint
            raise
        return kept

    def check_in_place(self) -> None:
        """Raise RunReplacedError if another run has taken over the run's folder."""
        self._call("log.check_in_place")

    def log_checkpoint(self, checkpoint: "SavedCheckpoint | None") -> None:
        """Log a checkpoint that became complete, and release what is kept of its steps. None: none did."""
        if checkpoint is not None:
            self._call("saved", checkpoint.step)
            self.log_message(
                f"checkpoint of step {checkpoint.step}: {checkpoint.size / 2**20:.0f} MiB complete after "
                f"{checkpoint.seconds:.1f} s, of which training waited {checkpoint.blocked_seconds:.2f} s"
            )

    def finish(self, step: int, on_request: bool = False) -> None:
        """Write the summary and the report after the last trained step."""
        self._call("finish", step, on_request)
