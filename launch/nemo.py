"""Use NeMo-Run for Slurm and for this machine: its executors, its scripts, its submission.

No other file imports nemo_run.

Facts of NeMo-Run 0.11.1 that this file depends on: it reads NEMORUN_HOME at import, so importers of this file set it before.
The batch script waits for a single task in the foreground, where bash defers signals, and for a group of one in the background.
It writes the names of environment variables in capitals and their values unquoted. A local tunnel copies nothing. It quotes the
options of sbatch, and no word of srun (its `noquote` is `str`): image and mounts are quoted here, and its own words, which are
paths of the checkout and the run, have to need no quotes (checks.check_paths).
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nemo_run as run
from nemo_run.core.execution.slurm import SlurmJobDetails

from launch.profile import Cluster
from launch.scripts import Task, variables
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.scratch import PrivateFolder

_POLL_SECONDS = 5  # interval at which the batch script checks its tasks, which delays its reaction to a signal


@dataclass(kw_only=True)
class _Logs(SlurmJobDetails):
    """Log files: one for each task and machine of a job. A restarted job appends to them."""

    @property
    def stdout(self) -> Path:
        return Path(str(self.folder), f"{self.job_name}-batch-%j.log")

    @property
    def srun_stdout(self) -> Path:
        return Path(str(self.folder), f"{self.job_name}-%j-%n-%N.log")


@dataclass(frozen=True)
class Submission:
    """A job of one or several tasks."""

    name: str
    home: Path
    number: int
    tasks: Sequence[Task]
    cluster: Cluster
    folder: Path
    setup: str = ""  # shell code for the batch script
    requeued: bool = False  # True: the job gets a signal before its time limit
    after: str | None = None  # number of a Slurm job that must succeed first; None: no waiting
    spare_nodes: int = 0
    variables: Sequence[str] = ()  # names of variables that `setup` exports for the tasks

    @property
    def id(self) -> str:
        """Return the id of NeMo-Run's experiment. NeMo-Run takes the text before the last underscore as its title."""
        return f"{self.name}_{self.number}"

    def render(self) -> str:
        """Return all scripts that a submission to Slurm would run, unchanged. Nothing is left on disk."""
        with PrivateFolder.create("launch") as private:
            home = private.path
            with _experiment(self, home) as experiment:
                _add_slurm(experiment, self, home)
                experiment.dryrun(log=False, delete_exp_dir=False)
            found = Path(home, "experiments", self.name, self.id)
            files = [*found.glob("*_sbatch.sh"), *sorted(found.glob("*/scripts/*.sh"))]
            texts = [f"#==== {file}\n{file.read_text().rstrip()}\n" for file in files]
            return "\n".join(texts).replace(str(home), str(self.home))

    def submit(self) -> str:
        """Submit the job to Slurm and return its number. Raise ConfigError with Slurm's message."""
        with _experiment(self, self.home) as experiment:
            _add_slurm(experiment, self, self.home)
            try:
                experiment.run(detach=True)
            except Exception as e:  # an error of `invoke`, through which NeMo-Run calls sbatch
                said = getattr(getattr(e, "result", None), "stderr", "") or str(e)
                raise ConfigError(f"sbatch refused the job: {' '.join(said.split())}") from None
            (handle,) = experiment.jobs[0].handles
        return str(handle).rpartition("/")[2].partition(";")[0]  # some clusters append ";" and their name

    def run_here(self) -> bool:
        """Run the task on this machine and wait. Return whether it succeeded. SIGINT and SIGTERM end it."""
        (task,) = self.tasks
        with _experiment(self, self.home) as experiment:
            job = experiment.add(run.Script(inline=task.script), executor=run.LocalExecutor(), name=task.name, tail_logs=True)

            def end(signum: int, frame: Any) -> None:
                experiment.cancel(job)

            experiment.run(detach=False)
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, end)
        return str(experiment.jobs[0].state) == "SUCCEEDED"


def _experiment(submission: Submission, home: Path) -> Any:
    return run.Experiment(
        submission.name, id=submission.id, base_dir=str(home), log_level="WARN", clean_mode=True,
        enable_goodbye_message=False, skip_status_at_exit=True, serialize_metadata_for_scripts=False,
    )  # fmt: skip


def _add_slurm(experiment: Any, submission: Submission, home: Path) -> None:
    executors = [_executor(submission, task, home) for task in submission.tasks]
    scripts = [run.Script(inline=task.script) for task in submission.tasks]
    experiment.add(scripts, executor=executors, name=submission.name)


def _executor(submission: Submission, task: Task, home: Path) -> Any:
    """Return the executor of a task. All tasks share one allocation; each uses its own machines of it."""
    cluster, slurm = submission.cluster, submission.cluster.slurm
    assert slurm is not None, "checked before"
    # By name: `--relative` counts only machines without a running step, and the script's first step may still run there.
    machines = f'--nodelist=$(IFS=,; echo "${{nodes[*]:{task.first}:{task.nodes}}}")'
    srun = [f"--nodes={task.nodes}", f"--ntasks={task.nodes}", "--ntasks-per-node=1", machines]
    srun += ["--overlap"] if task.shared else []  # otherwise the second task waits for the end of the first
    environment = variables(cluster, submission.home)
    image = cluster.container
    named = {"constraint": slurm.constraint, "reservation": slurm.reservation}  # options that NeMo-Run's executor lacks
    options = {name: value for name, value in named.items() if value is not None} | slurm.options
    executor = run.SlurmExecutor(
        account=slurm.account,
        partition=slurm.partition,
        qos=slurm.qos,
        time=slurm.time,
        mem=slurm.mem,
        exclusive=slurm.exclusive or None,
        nodes=max(t.first + t.nodes for t in submission.tasks) + submission.spare_nodes,
        ntasks_per_node=1,
        gpus_per_node=cluster.gpus_per_node or None,
        signal=f"B:USR1@{slurm.warning_seconds}" if submission.requeued and slurm.restarts else None,
        additional_parameters=options or None,
        container_image=image and shlex.quote(image.image),
        container_mounts=[f"{submission.folder}:{submission.folder}", *map(shlex.quote, image.all_mounts)] if image else [],
        container_env=sorted({*environment, *submission.variables, *cluster.secrets}) if image else None,
        srun_args=[*srun, *slurm.cpu_args, "--open-mode=append", *slurm.srun_args],
        setup_lines=submission.setup or None,
        env_vars=environment if task is submission.tasks[0] else {},  # exported once, for all tasks
        job_details=_Logs(job_name=f"{submission.name}-{task.name}", folder=str(submission.home)),
        tunnel=run.LocalTunnel(job_dir=str(home / "experiments")),
        packager=run.Packager(),
        wait_time_for_group_job=0,
        monitor_group_job_wait_time=_POLL_SECONDS,
        poll_estimated_start_time=False,
    )
    executor.dependencies = [f"slurm://nemo_run/{submission.after}"] if submission.after else []
    return executor
