"""Calibrate a plan with the recorded steps of a run: what its sequences were like, and how long its phases took."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tepo_megatron.errors import DataError
from tepo_megatron.observability.sinks import read_metrics
from tepo_megatron.plan.step import REFILLS, PhaseFactors, Predictor, StepPrediction

# phase of the record -> phases of the plan that it contains
MEASURED = {
    "rollout": ("sample", REFILLS),
    "old_stats": ("old log-probs", "log-probs of the weights that sampled", "reference log-probs"),
    "update": ("forward and backward", "gradients and weights over dp", "optimizer"),
    "sync": ("send weights", "change places"),
}
# 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, Section 3.3.4)
GPU_HOURS_PER_FAILURE = 54 * 24 * 16384 / 419
_CHECKPOINT = re.compile(r"checkpoint of step \d+: .* of which training waited ([0-9.]+) s")
_LOG_FILE = "log.txt"


@dataclass(frozen=True)
class RecordedRun:
    """Means and medians of a run's later half; the first steps compile and warm up.

    Attributes:
        steps: First and last of the steps that were read.
        seconds: Median seconds by phase of the record, and `total`.
        dropped: Share of the groups that were dropped as entirely right or entirely wrong.
        blocked: Seconds for which training waited for each checkpoint.
    """

    path: Path
    steps: tuple[int, int]
    seconds: Mapping[str, float]
    prompt: int
    response: int
    dropped: float
    blocked: Sequence[float] = ()


def read_run(path: Path, samples_per_prompt: int) -> RecordedRun:
    """Read the records of a run.

    Raises:
        DataError: There are no records, or no step of the later half trained on anything.
    """
    records = read_metrics(path)
    later = [record for record in records[len(records) // 2 :] if record.get("rollout/kept_groups")]
    if not later:
        raise DataError(f"{path}: none of its later steps learned from a group; give the folder of a run that trains")

    def median(key: str) -> float:
        return statistics.median(float(record.get(key) or 0.0) for record in later)

    def mean(key: str) -> float:
        return statistics.fmean(float(record.get(key) or 0.0) for record in later)

    tokens = statistics.fmean(float(r["tokens_per_second"] or 0.0) * float(r["seconds/total"] or 0.0) for r in later)
    response = mean("rollout/response_tokens_mean")
    prompt = tokens / (mean("rollout/kept_groups") * samples_per_prompt) - response
    sampled = mean("rollout/sampled_groups")
    dropped = 1 - (mean("rollout/kept_groups") + mean("rollout/stale_groups")) / sampled if sampled else 0.0
    seconds = {name: median(f"seconds/{name}") for name in (*MEASURED, "total")}
    log = path / _LOG_FILE
    text = log.read_text(errors="replace") if log.is_file() else ""
    return RecordedRun(
        path,
        (int(later[0]["step"] or 0), int(later[-1]["step"] or 0)),
        seconds,
        max(1, round(prompt)),
        max(1, round(response)),
        min(0.99, max(0.0, dropped)),
        tuple(float(found) for found in _CHECKPOINT.findall(text)),
    )


def calibrated(predictor: Predictor, run: RecordedRun) -> Predictor:
    """Return the predictor with the phases of the run: what it predicts for the run's own config are the run's seconds.

    A phase that the plan does not know of, or whose time it predicts as 0, stays in the share beyond the phases.
    """
    plain = replace(predictor, measured=PhaseFactors({}, 0.0), known={}).step()
    factors: dict[str, float] = {}
    for name, phases in MEASURED.items():
        predicted = sum(plain.phases[phase] for phase in phases)
        if predicted > 0 and (run.seconds[name] > 0 or name != "rollout"):
            factors |= dict.fromkeys(phases, run.seconds[name] / predicted)
    scaled = replace(predictor, measured=PhaseFactors(factors, 0.0), known={}).step()
    beyond = (run.seconds["total"] - scaled.modelled) / without_refills(scaled)
    return replace(predictor, measured=PhaseFactors(factors, beyond), known={})


def without_refills(step: StepPrediction) -> float:
    """Return the seconds of a step's phases with a single round of sampling."""
    return replace(step, phases={**step.phases, REFILLS: 0.0}).modelled


@dataclass(frozen=True)
class CheckpointInterval:
    """The interval of checkpoints at which waiting and repeated work cost the least together.

    Attributes:
        lost: Share of the time that waiting for checkpoints and repeating steps take.
        lost_now: The same for the config's interval. None: it writes none.
    """

    steps: int
    lost: float
    lost_now: float | None
    hours: float


def checkpoint_interval(
    blocked: float, step_seconds: float, every: int, gpus: int, gpu_hours_per_failure: float
) -> CheckpointInterval:
    """Return the best interval (Young 1974: the root of twice the cost of a checkpoint times the time between failures).

    Args:
        blocked: Seconds for which training waits for a checkpoint.
        step_seconds: Seconds of a step.
        every: The config's interval in steps; 0: it writes no checkpoints.
    """
    hours = gpu_hours_per_failure / gpus

    def lost(steps: int) -> float:
        seconds = steps * step_seconds
        return blocked / seconds + seconds / 2 / (hours * 3600)

    steps = max(1, round(math.sqrt(2 * blocked * hours * 3600) / step_seconds))
    return CheckpointInterval(steps, lost(steps), lost(every) if every else None, hours)
