"""Executors: the ways to run a job. Each module here is one executor with everything specific to it, listed in EXECUTORS.

A further executor is a module with everything that `Executor` names, an entry in the table below and, if needed, a section of
the profile: a type in launch/sections.py and a field of `Cluster`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from launch.executors import local, slurm
from launch.jobs import JobFolder, LogSelection, SubmittedJob
from launch.layout import Layout
from launch.profile import Cluster
from tepo_megatron.config import Config


class Executor(Protocol):
    """The interface of an executor module. The functions are called in this order, and raise ConfigError to refuse.

    The type of a job before its start is private to the module.
    """

    NAME: str  # name in --executor and in records, and of the section in a profile
    QUEUES: bool  # True if a job waits before it runs, so that a preflight comes first

    def after(self, folder: Path) -> str:
        """Return the id of the newest job of a folder, for a job that is to wait for it."""

    def check(self, cluster: Cluster, cfg: Config | None) -> None:
        """Check that the profile has what is needed, and nothing meaningless, before a run's machines are counted."""

    def check_run(self, cfg: Config, cluster: Cluster, layout: Layout) -> None:
        """Check that the machines have the run's files, and that the run can continue after a restart."""

    def training(self, cfg: Config, cluster: Cluster, layout: Layout, after: str | None, slot: JobFolder) -> Any:
        """Return the job of a run, which waits for the job with the id `after`, if any."""

    def command(self, kind: str, words: Sequence[str], slot: JobFolder, cluster: Cluster, after: str | None) -> Any:
        """Check and return the job of a command, which waits for the job with the id `after`, if any."""

    def render(self, job: Any) -> str:
        """Return the output of a dry run. Nothing is left on disk."""

    def start(self, job: Any, slot: JobFolder) -> int:
        """Submit or run a job and record it in its folder, which exists. Return the exit status of `launch`."""

    def find(self, slot: JobFolder) -> str | None:
        """Return the id of the job that was submitted from a folder and not recorded. None: there is none, or nobody knows."""

    def state(self, job: SubmittedJob) -> str:
        """Return the state of a job as text."""

    def ended(self, job: SubmittedJob) -> bool:
        """Return whether a job has ended for good, or is unknown to the scheduler."""

    def logs(self, job: SubmittedJob, folder: Path, selection: LogSelection) -> str:
        """Return the last lines of a job's logs; empty if there are none yet."""

    def attach(self, job: SubmittedJob, node: str | None) -> list[str]:
        """Return the words of a command that opens an interactive shell on a machine of a running job."""

    def cancel(self, job: SubmittedJob) -> str:
        """Cancel a job and return a message about it."""


_ALL: tuple[Executor, ...] = (local, slurm)
EXECUTORS = {executor.NAME: executor for executor in _ALL}
