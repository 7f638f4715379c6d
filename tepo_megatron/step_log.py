"""What one step reports: sums from rollouts and updates, turned into one line of metrics.jsonl."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.metrics import Metrics
from tepo_megatron.timing import Clock
from tepo_megatron.types import Rollout

if TYPE_CHECKING:
    from tepo_megatron.actor.actor import UpdateResult

# In the order of the record; what a step could not measure is null.
KEYS = (
    "reward/mean", "accuracy/mean", "actor/entropy", "actor/grad_norm", "loss/total", "loss/kl", "loss/clip_fraction",
    "tepo/kl_mask_share", "tepo/ratio_p01", "tepo/ratio_p50", "tepo/ratio_p99", "rollout/logprob_diff_mean",
    "rollout/logprob_diff_max", "rollout/response_tokens_mean", "rollout/truncated", "rollout/kept_groups",
)  # fmt: skip
PHASES = ("rollout", "reward", "old_stats", "update", "sync")


class StepLog:
    """Collects one step's metrics. Every rank fills one; rank 0's is written."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._ratios: list[Tensor] = []
        self._trained_tokens = 0

    def receive(self, collected: tuple[list[Rollout], Metrics]) -> list[Rollout]:
        """Take over the metrics of all samples; returns the rollouts that were kept."""
        rollouts, self._metrics = collected
        self._trained_tokens = sum(r.token_ids_L.numel() for r in rollouts)
        return rollouts

    def mismatch(self, values: dict[str, float]) -> float:
        """Record how far the engine is from the actor; returns the mean log-prob difference."""
        for name, value in values.items():
            self._metrics.add(name, value)
        return values["rollout/logprob_diff_mean"]

    def add(self, result: UpdateResult) -> None:
        """Record one optimizer step.

        The first update of a rollout batch runs on the very weights that gave the old entropies: its dH is rounding noise, so
        its mask share says nothing and is left out.
        """
        for name, pair in result.metrics.items():
            if name == "tepo/kl_mask_share" and result.update == 0:
                continue
            self._metrics.add(name, *pair)
        self._ratios.append(result.ratio_B)

    def record(self, clock: Clock) -> dict[str, float | None]:
        """One flat record: KEYS, then seconds by phase, then trained tokens (prompt and response) per second."""
        values = self._metrics.means()
        if self._ratios:
            quantiles = torch.quantile(torch.cat(self._ratios), torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64))
            for name, value in zip(("p01", "p50", "p99"), quantiles.tolist(), strict=True):
                values[f"tepo/ratio_{name}"] = value
        record = {key: values.get(key) for key in KEYS}
        for phase in PHASES:
            record[f"seconds/{phase}"] = clock.seconds.get(phase, 0.0)
        record["seconds/total"] = clock.total
        record["tokens_per_second"] = self._trained_tokens / clock.total
        return record
