"""Read the records of a run for a report."""

import json
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
from tepo_megatron.monitor.sinks import METRICS_FILE, read_steps
from tepo_megatron.report.curves import Curves

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
