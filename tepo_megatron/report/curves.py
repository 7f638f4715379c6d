"""The records of a run as one array per key, thinned for the live page, or summarized in one figure per quantity.

Letters in shapes: S steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tepo_megatron.monitor.sinks import Value

BUCKETS = 500  # a longer run is thinned to two values for each of this many ranges of steps
_MEANS = "seconds/"  # these are stacked, so a range keeps their mean: the extremes of the parts have other sums than the whole


class Curves:
    """Values of a run by key, one per step; NaN (a gap in the line) at a step without a value.

    Args:
        steps: Steps, ascending, float64 _S.
        columns: Values by key, float64 _S.
    """

    def __init__(self, steps: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        self.steps, self._columns = steps, columns

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Value]]) -> "Curves":
        """Return the curves of records, one per step, ascending."""
        keys = dict.fromkeys(key for record in records for key in record)
        columns = {key: np.array([math.nan if (v := r.get(key)) is None else float(v) for r in records]) for key in keys}
        return cls(columns.get("step", np.empty(0)), columns)

    def __getitem__(self, key: str) -> np.ndarray:
        return self._columns.get(key, np.full(len(self.steps), math.nan))

    def __contains__(self, key: str) -> bool:
        return key in self._columns and bool(np.isfinite(self._columns[key]).any())

    def named(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix` and have a value at some step."""
        return [key for key in self._columns if key.startswith(prefix) and key in self]

    def between(self, key: str) -> np.ndarray:
        """Return a quantity that only some steps measure, interpolated linearly between them; all NaN if no step has it."""
        values = self[key]
        known = np.isfinite(values)
        return np.interp(self.steps, self.steps[known], values[known]) if known.any() else values

    def thinned(self, buckets: int = BUCKETS) -> "Curves":
        """Return at most 2 * `buckets` values of each key: the least and the greatest of each range, in the order they came.

        Each pair is drawn at the first and the last step of its range. A short run is returned unchanged.
        """
        count = len(self.steps)
        if count <= 2 * buckets:
            return self
        width = math.ceil(count / buckets)
        rows = math.ceil(count / width)
        ends = np.minimum(np.arange(1, rows + 1) * width, count) - 1
        steps = np.stack([self.steps[np.arange(rows) * width], self.steps[ends]], axis=1).reshape(-1)
        return Curves(steps, {key: _thinned(x, rows, width, key) for key, x in self._columns.items()})


def _thinned(values: np.ndarray, rows: int, width: int, key: str) -> np.ndarray:
    padded = np.full(rows * width, math.nan)
    padded[: len(values)] = values
    table = padded.reshape(rows, width)
    known = np.isfinite(table)
    some = known.any(axis=1)
    if key.startswith(_MEANS):
        mean = np.where(known, table, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
        pair = np.stack([mean, mean], axis=1)
    else:
        low = np.where(known, table, math.inf).argmin(axis=1)
        high = np.where(known, table, -math.inf).argmax(axis=1)
        row = np.arange(rows)
        pair = np.stack([table[row, np.minimum(low, high)], table[row, np.maximum(low, high)]], axis=1)
    pair[~some] = math.nan
    return pair.reshape(-1)


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
