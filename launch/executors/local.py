"""The executor for this machine. A job is one script, which `launch` starts through NeMo-Run and waits for."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launch import checks, jobs, scripts
from launch.jobs import JobFolder, LogSelection, SubmittedJob, log_tails
from launch.layout import Layout
from launch.profile import Cluster
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config

if TYPE_CHECKING:
    from launch.nemo import Submission

NAME, QUEUES = "local", False


def after(folder: Path) -> NoReturn:
    raise ConfigError("--after: a local run is waited for anyway; start the next one when it has ended")


def check(cluster: Cluster, cfg: Config | None) -> None:
    if cluster.container is not None:
        raise ConfigError("--executor local starts no container; remove `container` from the cluster's profile")
    checks.check_secrets(cluster)


def check_run(cfg: Config, cluster: Cluster, layout: Layout) -> None:
    checks.check_run(cfg, cluster)


def training(cfg: Config, cluster: Cluster, layout: Layout, after: str | None, slot: JobFolder) -> Submission:
    if layout.train_nodes > 1 or layout.serve_nodes > 1:
        raise ConfigError(f"this run takes {layout.nodes} machines of {cluster.slots} ranks; use --executor slurm")
    return scripts.submission(slot, [scripts.Task("train", _script(cluster, layout, slot))], cluster)


def command(kind: str, words: Sequence[str], slot: JobFolder, cluster: Cluster, after: str | None) -> Submission:
    check(cluster, None)
    checks.check_paths([Path.cwd(), slot.run])
    checks.check_words(words)
    return scripts.submission(
        slot, [scripts.command(kind, words, cluster, Path.cwd(), _exports(cluster, slot), slot.code)], cluster
    )


def render(job: Submission) -> str:
    return job.tasks[0].script


def start(job: Submission, slot: JobFolder) -> int:
    slot.record(NAME, str(os.getpid()))
    return 0 if job.run_here() else 1


def find(slot: JobFolder) -> None:
    return None  # a job is recorded before it starts


def state(job: SubmittedJob) -> str:
    if job.host != os.uname().nodename:
        return f"on {job.host}"
    return "under way" if _is_launch(int(job.id)) else "ended"


def ended(job: SubmittedJob) -> bool:
    # the lock of a run's folder covers other machines
    return job.host != os.uname().nodename or not _is_launch(int(job.id))


def logs(job: SubmittedJob, folder: Path, selection: LogSelection) -> str:
    name = folder.absolute().name
    experiment = jobs.launch_folder(folder) / "experiments" / name / f"{name}_{job.number}"
    return log_tails(folder, job, sorted(experiment.rglob("combined.log")), selection)


def attach(job: SubmittedJob, node: str | None) -> NoReturn:
    raise ConfigError(f"attach: job {job.id} is a process of {job.host}; open a shell there")


def cancel(job: SubmittedJob) -> str:
    if job.host != os.uname().nodename:
        raise ConfigError(f"this job runs on {job.host}; call cancel there")
    if not _is_launch(int(job.id)):
        return f"process {job.id} has ended already"
    os.kill(int(job.id), signal.SIGTERM)
    return f"sent SIGTERM to process {job.id}"


def _script(cluster: Cluster, layout: Layout, slot: JobFolder) -> str:
    """Return all tasks of a run as one script. Disaggregated servers run next to the ranks and end with them."""
    train = scripts.joined([cluster.python, "-m", "tepo_megatron", "train", slot.config])
    lines = [*scripts.head(Path.cwd()), *_exports(cluster, slot)]
    if not layout.serve_nodes:
        return scripts.text([*lines, f"exec {train}"])
    serve = scripts.joined([cluster.python, *scripts.serve_words(slot.config, layout)])
    return scripts.text([*lines, *scripts.side_by_side(serve, train)])


def _exports(cluster: Cluster, slot: JobFolder) -> list[str]:
    """Return the first lines of a script: its variables, its code, and the record of its packages."""
    exports = [f"export {name}={value}" for name, value in scripts.variables(cluster, slot.home).items()]
    return [*exports, *slot.shell_lines(), *scripts.package_lines(cluster, slot.packages)]


def _is_launch(pid: int) -> bool:
    """Return whether the process lives and is a `launch`, because pids are reused."""
    try:
        return b"launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
