"""The executor for Kubernetes with KubeRay's operator. A job is a RayJob (launch/ray_plan.py), sent by launch/nemo_ray.py.

Volumes make the pods see the run's folder at the same path as `launch`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from launch import checks, jobs, scripts
from launch.executors.lazy import imported
from launch.jobs import SubmittedJob, log_tails, submitted
from launch.layout import Layout
from launch.profile import Cluster
from launch.ray_plan import STARTS, RayJob
from tepo_megatron.config import Config
from tepo_megatron.errors import ConfigError

NAME, RUN_IS_HERE, QUEUES = "kuberay", True, True


def after(folder: Path) -> NoReturn:
    raise ConfigError(f"--after {folder}: Kubernetes lets no job wait for another; start this one when that one has ended")


def check(cluster: Cluster, cfg: Config | None) -> None:
    """Check the profile, and that every path of a run or of launch itself is on a claim.

    Args:
        cluster: The cluster's profile.
        cfg: The run's config; None for a command.
    """
    checks.check_section(cluster, NAME)
    checks.raise_all(_faults(cluster, cfg))


def _faults(cluster: Cluster, cfg: Config | None) -> Iterator[str]:
    section = cluster.kuberay
    assert section is not None, "checked before"
    if cluster.container is None:
        yield "--executor kuberay: the cluster's profile names no container.image; pods need one, and Ray in it"
    elif cluster.container.all_mounts:
        yield "container.mounts are Pyxis'; with --executor kuberay use kuberay.claims, and remove them"
    if cluster.node_check.spare_nodes:
        yield "node_check.spare_nodes is Slurm's; set it to 0: KubeRay's job is started again on the machines that are there"
    if cluster.secrets and section.secret is None:
        yield f"secrets: {cluster.secrets[0]} has to be a key of a Secret of Kubernetes; name that with kuberay.secret"
    used = [("the working directory", str(Path.cwd()))]
    if cfg is not None:
        if section.restarts and not cfg.checkpoint.every and not cfg.rollout.only:
            yield (
                "checkpoint.every=0: after a failure the run would start over; set it to a number of steps, or "
                "kuberay.restarts in the cluster's profile to 0"
            )
        used += [(key, path) for key, path in checks.folders(cfg) if path is not None]
    for key, path in used:
        place = Path(path).absolute()
        if not any(place.is_relative_to(mount) for mount in section.claims.values()):
            yield (f"{key}={path} is on no volume of the pods; add a claim with its mount path to kuberay.claims")
    home = (Path.cwd() if cfg is None else cfg.run_dir).absolute()
    if not re.fullmatch(r"[\w./-]+", str(home)):
        yield (f"{home}: KubeRay gives it to a shell as it is; use a folder of letters, digits, . _ and - alone")


def check_run(cfg: Config, cluster: Cluster, layout: Layout) -> None:
    """Do nothing: `check` has already checked the paths.

    Args:
        cfg, cluster, layout: Unused.
    """


def training(cfg: Config, cluster: Cluster, layout: Layout, after: str | None) -> RayJob:
    resumes, gpus = not cfg.rollout.only, cluster.gpus if cfg.platform == "cuda" else 0  # rollout.only keeps no checkpoints
    return _job(cfg.run_dir, scripts.training(cfg, cluster, layout, Path.cwd(), STARTS), cluster, resumes, gpus)


def command(kind: str, words: Sequence[str], folder: Path, cluster: Cluster, after: str | None) -> RayJob:
    check(cluster, None)
    checks.check_paths([Path.cwd(), folder])
    return _job(folder, [scripts.command(kind, words, cluster, Path.cwd())], cluster)


def render(job: RayJob) -> str:
    return _client().render(job)


def start(job: RayJob, folder: Path) -> int:
    return submitted(folder, NAME, _client().submit(job))


def state(job: SubmittedJob) -> str:
    return _client().state(job.id)


def logs(job: SubmittedJob, folder: Path, lines: int) -> str:
    """Return the last lines of the job's log files; if there are none yet, the submitter's output.

    The names of the files end with the submission's number, like the id.

    Args:
        job: The job.
        folder: Its folder.
        lines: Number of lines of each log.
    """
    paths = sorted(jobs.launch_folder(folder).glob(f"*-{job.id.rpartition('-')[2]}.log"))
    printed = "" if paths else _client().submitter_output(job.id, lines)
    return printed or log_tails(folder, paths, lines)


def cancel(job: SubmittedJob) -> str:
    _client().cancel(job.id)
    return f"job {job.id} is cancelled"


def _job(
    folder: Path, tasks: Sequence[scripts.Task], cluster: Cluster, resumes: bool = False, gpus: int | None = None
) -> RayJob:
    job = RayJob(*jobs.next_submission(folder), tasks, cluster, resumes, gpus)
    os.environ["NEMORUN_HOME"] = str(job.home)
    return job


def _client() -> ModuleType:
    return imported("launch.nemo_ray")
