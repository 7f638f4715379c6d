"""Collect the metrics of one step: sums from rollouts and updates become one line of metrics.jsonl."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.base.types import STATUSES
from tepo_megatron.monitor.metrics import Metrics, quantiles
from tepo_megatron.monitor.tracer import Clock

if TYPE_CHECKING:
    from tepo_megatron.actor.accumulator import UpdateResult

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
