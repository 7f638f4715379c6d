"""Ask `tepo plan` whether the run fits its GPUs, and whether a checkpoint is complete before the time limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launch.profile import Cluster
from launch.stops import patience_of
from tepo_megatron.config import Config
from tepo_megatron.errors import TepoError

if TYPE_CHECKING:
    from launch.preflight import Report


def check(cfg: Config, cluster: Cluster, report: Report) -> None:
    """Add the verdict of `tepo plan` to a report, and the fault of checkpoints that come too seldom.

    Args:
        cfg: The run's config.
        cluster: The cluster's profile.
        report: What the preflight found so far.
    """
    if cfg.platform != "cuda":
        return
    gpu = cluster.gpu or (cluster.skypilot.gpu if cluster.skypilot is not None else None) or "H100"
    try:
        from tepo_megatron.plan.command import PlanRequest, predictor_of, refusal
        from tepo_megatron.plan.search import judge

        predictor = predictor_of(cfg, PlanRequest(gpu=gpu))
        found = judge(predictor)
    except ModuleNotFoundError as e:
        report.notes.append(f"tepo plan was skipped: {e.name} is not installed here; run `make launch`")
        return
    except TepoError as e:
        if str(e).startswith("--gpu") and cluster.gpu is not None:
            report.faults.append(f"gpu={gpu}: {str(e).partition(': ')[2]}; correct it in the profile")
        else:
            report.notes.append(f"tepo plan was skipped: {' '.join(str(e).split())}")
        return
    if found.why:
        report.faults.append(f"parallel, rollout: tepo plan for {gpu}: {refusal(found, found.why)}")
    elif found.step is not None:
        _check_interval(cfg, cluster, predictor, found.step.seconds, report)


def _check_interval(cfg: Config, cluster: Cluster, predictor: Any, seconds: float, report: Report) -> None:
    """Add a fault if the steps until the next checkpoint take longer than the batch script waits for it.

    Args:
        cfg: The run's config.
        cluster: The cluster's profile.
        predictor: Predictor of `tepo plan`.
        seconds: Predicted time of a step.
        report: What the preflight found so far.
    """
    slurm = cluster.slurm
    if slurm is None or not slurm.restarts or not cfg.checkpoint.every:
        return
    steps, patience = steps_to_save(cfg), patience_of(slurm.warning_seconds)
    low, high = seconds * (1 - predictor.machine.assumed.error), seconds * (1 + predictor.machine.assumed.error)
    if steps * seconds <= patience:
        return
    fits = max(1, int(patience / seconds))
    lower = f"set checkpoint.every to {fits} at most, or " if seconds <= patience and fits < steps else ""
    report.faults.append(
        f"checkpoint.every={cfg.checkpoint.every}: a step takes about {seconds:.0f} s ({low:.0f} to {high:.0f}, tepo plan), so "
        f"{steps} steps take {steps * seconds:.0f} s, and before its time limit the job waits {patience} s for a checkpoint; "
        f"{lower}raise slurm.warning_seconds={slurm.warning_seconds} to {int(steps * high) + 60}"
    )


def steps_to_save(cfg: Config) -> int:
    """Return the steps that may pass between the warning and the next complete checkpoint."""
    return cfg.checkpoint.every
