"""Summarize curves: one figure per quantity, and how it is formatted."""

import math
from dataclasses import dataclass

import numpy as np

from tepo_megatron.report.curves import Curves

WINDOW = 5  # number of last values that "at the end" refers to
NOTHING = "–"  # noqa: RUF001


@dataclass(frozen=True)
class Quantity:
    """A metric of metrics.jsonl with a readable name."""

    label: str
    key: str
    percent: bool = False  # the metric is a share, to be shown in percent
    sparse: bool = False  # only some steps measure it; its curve joins them

    def format(self, value: float, sign: str = "") -> str:
        """Return a value as a table cell."""
        if not math.isfinite(value):
            return NOTHING
        if self.percent:
            return f"{100 * value:{sign}z.1f}{' points' if sign else '%'}"
        return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.4g}"


QUANTITIES = (
    Quantity("accuracy of rollouts", "accuracy/mean", percent=True),
    Quantity("reward", "reward/mean"),
    Quantity("cross-entropy, nats per token", "sft/loss"),
    Quantity("held-out cross-entropy, nats per token", "sft/eval_loss", sparse=True),
    Quantity("entropy, nats per token", "actor/entropy"),
    Quantity("KL to the reference, nats per token", "loss/ref_kl"),
    Quantity("KL term, nats per token", "loss/kl"),
    Quantity("tokens under the KL mask", "tepo/kl_mask_share", percent=True),
    Quantity("ratio w, 1st percentile", "tepo/ratio_p01"),
    Quantity("ratio w, 99th percentile", "tepo/ratio_p99"),
    Quantity("tokens clipped", "loss/clip_fraction", percent=True),
    Quantity("gradient norm", "actor/grad_norm"),
    Quantity("response, tokens", "rollout/response_tokens_mean"),
    Quantity("responses at the length limit", "rollout/truncated", percent=True),
    Quantity("rollout/train difference, mean, nats", "rollout/logprob_diff_mean"),
    Quantity("rollout/train difference, max, nats", "rollout/logprob_diff_max"),
    Quantity("seconds per step", "seconds/total"),
    Quantity("tokens per second", "tokens_per_second"),
)


def at_end(values: np.ndarray) -> float:
    """Return the mean of the last WINDOW known values; NaN without any."""
    known = values[np.isfinite(values)][-WINDOW:]
    return float(known.mean()) if known.size else math.nan


def table(curves: Curves) -> list[tuple[str, ...]]:
    """Return a row for each quantity that the run has: label, first value, mean at the end, lowest, highest."""
    rows = []
    for quantity in QUANTITIES:
        if quantity.key in curves:
            values = curves[quantity.key]
            known = values[np.isfinite(values)]
            cells = (known[0], at_end(values), known.min(), known.max())
            rows.append((quantity.label, *(quantity.format(float(cell)) for cell in cells)))
    return rows
