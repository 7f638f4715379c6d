"""Ask `tepo plan` whether the run fits its GPUs, and whether a step ends between the warning and the time limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launch.profile import Cluster
from tepo_megatron.config import Config
from tepo_megatron.errors import TepoError

if TYPE_CHECKING:
    from launch.preflight import Report


def check(cfg: Config, cluster: Cluster, report: Report) -> None:
    """Add the verdict of `tepo plan`, and the fault of a warning that is shorter than a step."""
    if cfg.platform != "cuda":
        return
    gpu = cluster.gpu or "H100"
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
        _check_warning(cluster, predictor, found.step.seconds, report)


def _check_warning(cluster: Cluster, predictor: Any, seconds: float, report: Report) -> None:
    """Add a fault if the step that runs when the warning comes takes longer than the batch script waits for it."""
    slurm = cluster.slurm
    if slurm is None or not slurm.restarts:
        return
    patience, error = slurm.patience, predictor.machine.assumed.error
    low, high = seconds * (1 - error), seconds * (1 + error)
    if seconds <= patience:  # one step may pass between the warning and a complete checkpoint
        return
    report.faults.append(
        f"slurm.warning_seconds={slurm.warning_seconds}: before its time limit the job waits {patience} s until the running "
        f"step is saved, and a step takes about {seconds:.0f} s ({low:.0f} to {high:.0f}, tepo plan); raise it to "
        f"{int(high) + 60}"
    )
