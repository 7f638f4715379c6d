"""Ask `tepo plan` whether the run fits its GPUs, and whether a step ends between the warning and the time limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.profile import Cluster
from tepo_megatron.config import Config
from tepo_megatron.errors import TepoError

if TYPE_CHECKING:
    from launch.preflight import Report

MARGIN = 1.35  # `tepo plan` was off by up to so much from published steps


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
        _check_warning(cluster, found.step.seconds, report)


def _check_warning(cluster: Cluster, seconds: float, report: Report) -> None:
    """Add a fault if a step of predicted `seconds`, running when the warning comes, outlasts the batch script's patience."""
    slurm = cluster.slurm
    if slurm is None or not slurm.restarts:
        return
    patience = slurm.patience
    if seconds <= patience:  # one step may pass between the warning and a complete checkpoint
        return
    report.faults.append(
        f"slurm.warning_seconds={slurm.warning_seconds}: before its time limit the job waits {patience} s until the running "
        f"step is saved, and a step takes about {seconds:.0f} s (tepo plan); raise it to "
        f"{int(MARGIN * seconds) + 60}"
    )
