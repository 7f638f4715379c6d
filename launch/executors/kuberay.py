"""The executor for Kubernetes with KubeRay's operator. A job is a RayJob (launch/ray_plan.py), sent by launch/nemo_ray.py.

Volumes make the pods see the run's folder at the same path as `launch`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from launch import checks, jobs, scripts
from launch.executors.lazy import imported
from launch.jobs import JobFolder, LogSelection, SubmittedJob, log_tails
from launch.layout import Layout
from launch.profile import Cluster
from launch.ray_plan import STARTS, RayJob
from launch.sections import KubeRayConfig
from tepo_megatron.config import Config
from tepo_megatron.errors import ConfigError

NAME, RUN_IS_HERE, QUEUES = "kuberay", True, True


def after(folder: Path) -> NoReturn:
    raise ConfigError(f"--after {folder}: Kubernetes lets no job wait for another; start this one when that one has ended")


def check(cluster: Cluster, cfg: Config | None) -> None:
    """Check the profile, and that every path of a run or of launch itself is on a claim."""
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
    yield from _unseen(used, section)
    home = (Path.cwd() if cfg is None else cfg.run_dir).absolute()
    if not re.fullmatch(r"[\w./-]+", str(home)):
        yield (f"{home}: KubeRay gives it to a shell as it is; use a folder of letters, digits, . _ and - alone")


def _unseen(used: Sequence[tuple[str, str]], section: KubeRayConfig) -> Iterator[str]:
    """Yield a fault for each path, given with its key, that is on no volume of the pods."""
    for key, path in used:
        place = Path(path).absolute()
        if not any(place.is_relative_to(mount) for mount in section.claims.values()):
            yield (f"{key}={path} is on no volume of the pods; add a claim with its mount path to kuberay.claims")


def check_run(cfg: Config, cluster: Cluster, layout: Layout) -> None:
    """Do nothing: `check` has already checked the paths."""


def training(cfg: Config, cluster: Cluster, layout: Layout, after: str | None, slot: JobFolder) -> RayJob:
    resumes, gpus = not cfg.rollout.only, cluster.gpus if cfg.platform == "cuda" else 0  # rollout.only keeps no checkpoints
    lines, packages = slot.shell_lines(), tuple(slot.packages)
    starts = dataclasses.replace(STARTS, setup=lines, config=slot.config, packages=packages)
    return _job(slot, scripts.training(cfg, cluster, layout, Path.cwd(), starts), cluster, resumes, gpus)


def command(kind: str, words: Sequence[str], slot: JobFolder, cluster: Cluster, after: str | None) -> RayJob:
    check(cluster, None)
    checks.check_paths([Path.cwd(), slot.run])
    assert cluster.kuberay is not None, "just checked"
    checks.raise_all(_unseen([("the folder", str(slot.run))], cluster.kuberay))
    lines = [*slot.shell_lines(), *scripts.package_lines(cluster, slot.packages)]
    return _job(slot, [scripts.command(kind, words, cluster, Path.cwd(), lines, slot.code)], cluster)


def render(job: RayJob) -> str:
    return _client().render(job)


def start(job: RayJob, slot: JobFolder) -> int:
    shell = scripts.shell(job.cluster, Path.cwd(), slot.home, slot.shell_lines())
    slot.record(NAME, f"{job.kuberay.namespace}/{job.id}", shell)  # a kill from here on hides no job
    return slot.submitted(NAME, _client().submit(job), shell=shell)


def find(slot: JobFolder) -> None:
    return None  # a job is recorded before it is submitted


def state(job: SubmittedJob) -> str:
    return _client().state(job.id)


def ended(job: SubmittedJob) -> bool:
    return bool(_client().ended(job.id))


def attach(job: SubmittedJob, node: str | None) -> list[str]:
    """Return the words that open an interactive shell in the pod of a machine, through kubectl.

    Args:
        node: Index of the machine, in the order of on_ray.py. None: the first.
    """
    namespace = job.id.partition("/")[0]
    return ["kubectl", "exec", "-it", "-n", namespace, _client().worker_pod(job.id, node), "--", *job.shell]


def logs(job: SubmittedJob, folder: Path, selection: LogSelection) -> str:
    """Return the last lines of the job's log files; if there are none yet, the submitter's output.

    The names of the files end with the submission's number, like the id.
    """
    paths = sorted(jobs.launch_folder(folder).glob(f"*-{job.id.rpartition('-')[2]}.log"))
    printed = "" if paths else _client().submitter_output(job.id, selection.lines)
    return printed or log_tails(folder, job, paths, selection)


def cancel(job: SubmittedJob) -> str:
    _client().cancel(job.id)
    return f"job {job.id} is cancelled"


def _job(
    slot: JobFolder, tasks: Sequence[scripts.Task], cluster: Cluster, resumes: bool = False, gpus: int | None = None
) -> RayJob:
    job = RayJob(slot.name, slot.home, slot.number, tasks, cluster, resumes, gpus)
    os.environ["NEMORUN_HOME"] = str(job.home)
    return job


def _client() -> ModuleType:
    return imported("launch.nemo_ray")
