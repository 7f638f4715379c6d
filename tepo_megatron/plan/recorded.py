"""Read what a recorded run tells a plan: how long its sequences were, and how long its phases took (`tepo plan --from RUN`)."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tepo_megatron.errors import DataError
from tepo_megatron.observability.sinks import read_metrics
from tepo_megatron.plan.roofline import REFILLS, Predictor

# phase of the record -> phases of the plan that it contains
MEASURED = {
    "rollout": ("sample", REFILLS),
    "old_stats": ("old log-probs", "log-probs of the weights that sampled", "reference log-probs"),
    "update": ("forward and backward", "gradients and weights over dp", "optimizer"),
    "sync": ("send weights", "change places"),
}


@dataclass(frozen=True)
class RecordedRun:
    """Means and medians of a run's later half; the first steps compile and warm up."""

    seconds: Mapping[str, float]  # median seconds by phase of the record, and `total`
    prompt: int
    response: int
    dropped: float  # share of the groups that were dropped as entirely right or entirely wrong


def read_run(path: Path, samples_per_prompt: int) -> RecordedRun:
    """Read the records of a run. Raises DataError if no step of its later half trained on anything."""
    records = read_metrics(path)
    later = [record for record in records[len(records) // 2 :] if record.get("rollout/kept_groups")]
    if not later:
        raise DataError(f"{path}: none of its later steps learned from a group; give the folder of a run that trains")

    def mean(key: str) -> float:
        return statistics.fmean(float(record.get(key) or 0.0) for record in later)

    tokens = statistics.fmean(float(r["tokens_per_second"] or 0.0) * float(r["seconds/total"] or 0.0) for r in later)
    response, sampled = mean("rollout/response_tokens_mean"), mean("rollout/sampled_groups")
    prompt = tokens / (mean("rollout/kept_groups") * samples_per_prompt) - response
    dropped = 1 - (mean("rollout/kept_groups") + mean("rollout/stale_groups")) / sampled if sampled else 0.0
    taken = {name: [float(record.get(f"seconds/{name}") or 0.0) for record in later] for name in (*MEASURED, "total")}
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    return RecordedRun(seconds, max(1, round(prompt)), max(1, round(response)), min(0.99, max(0.0, dropped)))


def calibrated(predictor: Predictor, run: RecordedRun) -> Predictor:
    """Return the predictor with the phases of the run: what it predicts for the run's own config are the run's seconds."""
    phases = replace(predictor, factors={}, beyond=0.0).step().phases
    factors: dict[str, float] = {}
    for name, parts in MEASURED.items():
        predicted = sum(phases[part] for part in parts)
        if predicted > 0 and (run.seconds[name] > 0 or name != "rollout"):
            factors |= dict.fromkeys(parts, run.seconds[name] / predicted)
    scaled = replace(predictor, factors=factors, beyond=0.0)
    extra = run.seconds["total"] - scaled.step().seconds
    share = replace(scaled, beyond=1.0).step().phases["beyond the phases"]
    return replace(scaled, beyond=extra / share)
