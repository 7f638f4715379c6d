"""Where a job runs. Each module here is one executor and says all that is its own; `launch` looks it up in EXECUTORS.

A further one is a module with all that `Executor` names, its place in the table below, and, if it needs one, a section of the
profile: a type in launch/sections.py and a field of `Cluster`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from launch.executors import kuberay, local, skypilot, slurm
from launch.jobs import Job
from launch.layout import Layout
from launch.profile import Cluster
from tepo_megatron.config import Config


class Executor(Protocol):
    """What such a module has. Its functions are called in this order, and raise ConfigError for what it refuses.

    NAME: in --executor, in records, and of its section in a profile; RUN_IS_HERE: `launch` and the machines see one folder of
    the run, so that `launch` looks there for one that is finished, and makes it. Of what type a job is before its start is the
    module's own affair.
    """

    NAME: str
    RUN_IS_HERE: bool

    def after(self, folder: Path) -> str:
        """The id of the newest job of a folder, for a job that is to wait for it."""

    def check(self, cluster: Cluster, cfg: Config | None) -> None:
        """What of a profile is needed, or has no meaning here, before a run's machines are counted. cfg: None for a command."""

    def check_run(self, cfg: Config, cluster: Cluster, layout: Layout) -> None:
        """Whether the machines have the run's files, and the run can go on when it is started again."""

    def training(self, cfg: Config, cluster: Cluster, layout: Layout, after: str | None) -> Any:
        """The job of a run."""

    def command(self, kind: str, words: Sequence[str], folder: Path, cluster: Cluster, after: str | None) -> Any:
        """The job of a command, `convert` or `evaluate`, with these words, checked; its logs go to `folder`."""

    def render(self, job: Any) -> str:
        """What a dry run prints. Nothing is left on disk."""

    def start(self, job: Any, folder: Path) -> int:
        """Submit a job, or run it, and record it as the newest of its folder; returns the exit status of `launch`."""

    def state(self, job: Job) -> str:
        """In words."""

    def logs(self, job: Job, folder: Path, lines: int) -> str:
        """The ends of its logs, so many lines of each; empty: there are none yet."""

    def cancel(self, job: Job) -> str:
        """End it, and say so."""


_ALL: tuple[Executor, ...] = (local, slurm, kuberay, skypilot)
EXECUTORS = {executor.NAME: executor for executor in _ALL}
