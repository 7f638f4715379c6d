"""Read the records of a run for a report: one array per key, thinned for the live page, or one figure per quantity.

Letters in shapes: S steps.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.records import EVALUATION
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.monitor.alerts import judge
from tepo_megatron.monitor.sinks import METRICS_FILE, Value, read_steps

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


_LOST = re.compile(r"step \d+: \d+ of \d+ samples were lost; ")  # as `rollout/containment.py` writes it
_SHOWN_LOSSES = 3


Evaluations = Mapping[str, Sequence[tuple[int, float, float]]]  # name -> (step, accuracy, standard error), ascending


@dataclass(frozen=True)
class Summary:
    """Contents of summary.json of a finished run."""

    steps: int
    seconds: float  # duration of the run in seconds
    # (step, accuracy, standard error) before and after the run, as far as measured; none of fine-tuning
    evaluations: list[tuple[int, float, float]]


@dataclass(frozen=True)
class RunRecord:
    """The folder of a run with its config.yaml, metrics.jsonl and summary.json."""

    folder: Path
    cfg: Config
    curves: Curves
    summary: Summary | None  # summary; None until the run has ended
    notes: tuple[str, ...] = ()  # sentences on faults of its records, and its alerts
    evaluations: Evaluations = field(default_factory=dict)

    @property
    def fine_tuned(self) -> bool:
        """Return whether the run is one of `tepo sft`."""
        return "sft/epoch" in self.curves

    @property
    def last_step(self) -> float:
        """End of the step axes: the last step planned or recorded; the last one recorded of fine-tuning."""
        recorded: float = self.curves.steps[-1]
        return recorded if self.fine_tuned else max(self.cfg.training.steps, recorded)


def read_run(folder: Path) -> RunRecord:
    """Read a run. Raises DataError if no step was recorded or a file is malformed, ConfigError if config.yaml is malformed."""
    steps = read_steps(folder)
    alerts = judge((record["step"], record) for record in steps.records)
    notes = (*(f"{METRICS_FILE}: {fault}." for fault in steps.faults), *(f"{alert.message}." for alert in alerts))
    notes += tuple(lost_samples(folder / "log.txt"))
    summary = read_summary(folder / "summary.json")
    curves, evaluations = Curves.of(steps.records), evaluations_of(steps.evaluations, summary)
    return RunRecord(folder, load_config(folder / "config.yaml"), curves, summary, notes, evaluations)


def evaluations_of(records: Sequence[Mapping[str, float | None]], summary: Summary | None) -> Evaluations:
    """Return the evaluations in their records, which are ascending by step; those of the summary if there are none."""
    by_name: dict[str, list[tuple[int, float, float]]] = {}
    for record in records:
        for key, mean in record.items():
            prefix, _, kind = key.rpartition("/")
            if kind == "accuracy" and mean is not None:
                row = int(record["step"] or 0), mean, record.get(f"{prefix}/standard_error") or 0.0
                by_name.setdefault(prefix.removeprefix(EVALUATION), []).append(row)
    if not by_name and summary and summary.evaluations:  # a run of an earlier version
        return {"held_out": summary.evaluations}
    return by_name


def lost_samples(log: Path) -> list[str]:
    """Return a sentence on the samples that a run lost, with the first reason of each of the last steps that lost some."""
    text = log.read_text(errors="replace") if log.exists() else ""
    losses = [line[match.start() :] for line in text.splitlines() if (match := _LOST.search(line))]
    if not losses:
        return []
    return [f"{len(losses)} steps lost samples, which training left out. The last of them:", *losses[-_SHOWN_LOSSES:]]


def facts(run: RunRecord) -> tuple[str, ...]:
    """Return the circumstances of a run in a few words each."""
    cfg, curves, summary = run.cfg, run.curves, run.summary
    sizes = {name: getattr(cfg.parallel, name) for name in ("dp", "tp", "pp", "vpp", "cp", "ep")}
    layout = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 rank"
    progress = f"step {curves.steps[-1]:.0f} of {cfg.training.steps}"
    if run.fine_tuned:
        progress = f"update {curves.steps[-1]:.0f}, epoch {curves['sft/epoch'][-1]:.2f} of {cfg.sft.epochs}"
    if summary is not None:
        progress = f"{summary.steps} steps in {duration(summary.seconds)}"
    facts = [
        "fine-tuning" if run.fine_tuned else cfg.objective.name,
        Path(cfg.model.path).name,
        layout,
        f"{cfg.platform} {cfg.model.precision}",
        progress,
    ]
    if restarts := int(np.nansum(curves["rollout/server_restarts"])):
        facts.append(f"{restarts} server restart{'s' * (restarts > 1)}")
    return tuple(facts)


def duration(seconds: float) -> str:
    """Format seconds as hours and minutes, minutes and seconds, or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def read_summary(path: Path) -> Summary | None:
    """Return the summary; None while the run has not ended. Raises DataError for a malformed file."""
    if not path.exists():
        return None
    try:
        row = json.loads(path.read_text())
        if "held_out_loss" in row:  # fine-tuning
            return Summary(row["steps"], row["seconds"], [])
        evaluations = [
            (step, row[f"accuracy_{when}"], row["standard_error"][when] or 0.0)
            for step, when in ((0, "before"), (row["steps"], "after"))
            if row[f"accuracy_{when}"] is not None
        ]
        return Summary(row["steps"], row["seconds"], evaluations)
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise DataError(f"{path}: not the summary of a run ({e!r}); remove it to draw the curves alone") from None
