"""The interface between the training loop and the rollout side of a run, and the metrics of a step, to which both sides add.

The sums from rollouts and updates become one line of metrics.jsonl. The methods of rank 0's `Driver` are calls of the rollout
service (`service/`), in which `main_driver.MainDriver` makes them. On other ranks, which have no rollout side, they do nothing.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tepo_megatron.base.types import STATUSES
from tepo_megatron.config import Config
from tepo_megatron.monitor.metrics import Metrics, quantiles
from tepo_megatron.monitor.tracer import Clock
from tepo_megatron.service.messages import KeptRollouts, Waited
from tepo_megatron.trainer.service_client import PendingAnswer, ServiceClient, ServiceEngine

if TYPE_CHECKING:
    from tepo_megatron.actor.accumulator import UpdateResult
    from tepo_megatron.checkpoint.saving import SavedCheckpoint

# Keys in the order of the record. Values that a step could not measure are null.
KEYS = (
    "reward/mean", "reward/ref_kl", "accuracy/mean", "actor/entropy", "actor/grad_norm", "loss/total", "loss/kl",
    "loss/ref_kl", "loss/clip_fraction", "loss/clip_fraction_low", "loss/clip_fraction_high", "tepo/kl_mask_share",
    "tepo/mask_below_noise", "tepo/entropy_noise_floor", "tepo/dH_up_p05", "tepo/dH_up_p50", "tepo/dH_up_p95",
    "tepo/dH_down_p05", "tepo/dH_down_p50", "tepo/dH_down_p95", "tepo/ratio_p01", "tepo/ratio_p50", "tepo/ratio_p99",
    "weighting/affected_share", "correction/weight_mean", "rollout/logprob_diff_mean", "rollout/logprob_diff_max",
    "truncation/recomputed", "truncation/outside", "truncation/differs", "truncation/cut", "truncation/kept_mean",
    "gate/logprob_diff_mean", "gate/logprob_diff_worst", "gate/compared_share",
    "rollout/response_tokens_mean", "rollout/truncated", "rollout/staleness", "rollout/mixed_versions",
    "rollout/sampled_groups", "rollout/kept_groups", "rollout/stale_groups", "rollout/server_restarts",
    "rollout/samples_raised", "rollout/samples_timed_out", "rollout/samples_over_limit", "rollout/sequences_per_sample",
    "sync/bytes_sent", "sync/bytes_full",
    "packing/computed_tokens", "packing/shared_share", "packing/padding_share", "packing/balance", "packing/bubble_share",
    "packing/microbatches", "mfu",
    *(f"grading/{status}" for status in STATUSES),
)  # fmt: skip
# keys of each server and of each of several terms of the reward, of which a run has any number
OF_RUN = ("server/", "reward/terms/")
_OF_ENTROPY_CHANGE = ("tepo/kl_mask_share", "tepo/mask_below_noise")
# `wait`: time that training waited for `rollout` and `grading_wait`, which run concurrently if rollouts are sampled ahead.
# `grading_wait` is what grading took after the last sample. `grading_cpu` is no phase: it is processor time of the workers.
# `rollout_tail` is the part of `rollout` after nine tenths of the groups had arrived.
PHASES = ("wait", "rollout", "rollout_tail", "grading_wait", "grading_cpu", "old_stats", "reference", "update", "sync")


class StepLog:
    """The metrics of one step. Every rank fills one; rank 0's is written."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._ratios: list[Tensor] = []
        self._histograms: dict[str, Tensor] = {}
        self._trained_tokens = 0
        self._memory: dict[str, float | None] = {}

    def receive(self, trained_tokens: int, metrics: Metrics | None) -> None:
        """Take over rollouts that are trained on."""
        self._trained_tokens += trained_tokens
        for name, pair in ({} if metrics is None else metrics.pairs()).items():
            self._metrics.add(name, *pair)

    def note(self, values: Mapping[str, float | None]) -> None:
        """Record values measured once per step. None: the value could not be measured."""
        for name, value in values.items():
            if value is not None:
                self._metrics.add(name, value)

    def memory(self, values: dict[str, float | None]) -> None:
        """Record the memory held in the step's phases, by key of the record. Empty: not measured."""
        self._memory = values

    def add(self, result: "UpdateResult") -> None:
        """Record one optimizer step.

        The first update of a rollout batch uses the very weights that gave the old entropies. Its dH is 0 or rounding noise, so
        metrics that depend on dH are left out.
        """
        for name, pair in result.metrics.items():
            if result.knows_entropy_change or name not in _OF_ENTROPY_CHANGE:
                self._metrics.add(name, *pair)
        if result.knows_entropy_change:
            for name, counts in result.histograms.items():
                self._histograms[name] = self._histograms.get(name, 0) + counts
        self._ratios.append(result.ratio_B)

    def record(self, clock: Clock) -> dict[str, float | None]:
        """Return one flat record: KEYS, memory, seconds by phase, and trained tokens (prompt and response) per second."""
        values = self._metrics.means()
        if self._ratios:
            ratios = torch.quantile(torch.cat(self._ratios), torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64))
            for name, value in zip(("p01", "p50", "p99"), ratios.tolist(), strict=True):
                values[f"tepo/ratio_{name}"] = value
        for name, counts in self._histograms.items():
            for share, quantile in zip(("p05", "p50", "p95"), quantiles(counts, (0.05, 0.5, 0.95)), strict=True):
                values[f"{name}_{share}"] = quantile
        record = {key: values.get(key) for key in KEYS} | self._memory
        record |= {key: value for key, value in values.items() if key.startswith(OF_RUN)}
        record |= {f"seconds/{phase}": clock.seconds.get(phase, 0.0) for phase in PHASES}
        return record | {"seconds/total": clock.total, "tokens_per_second": self._trained_tokens / clock.total}


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
