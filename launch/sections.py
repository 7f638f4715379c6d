"""Profile sections: `node_check`, and those of individual executors. launch/profile.py has the rest of a profile."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Annotated, Any, Literal

from pydantic import Field

from tepo_megatron.config.fields import NonNegative, config

# Limit since the run has ended before its time limit: requeueing takes seconds; then Slurm ends the job; key
# slurm.warning_seconds
_MARGIN_SECONDS = 60
# sbatch options that other keys set. If one is given twice, the last silently wins.
_OWN_OPTIONS = {
    "account", "partition", "qos", "time", "nodes", "ntasks_per_node", "gpus_per_node", "mem", "exclusive", "signal",
    "output", "error", "job_name", "dependency", "requeue", "open_mode", "export", "constraint", "reservation", "gpus",
}  # fmt: skip
# The same for srun. Single letters are short forms.
_OWN_SRUN_ARGS = {
    "nodes", "N", "ntasks", "n", "ntasks-per-node", "nodelist", "w", "output", "o", "error", "e", "overlap", "open-mode",
    "chdir", "D", "wait", "W", "kill-on-bad-exit", "K", "container-image", "container-mounts", "container-env",
    "container-workdir", "export",
}  # fmt: skip
# Of the options with a key of their own, those that a command's job may have otherwise.
_OF_COMMANDS = {"partition", "qos", "time", "mem", "constraint", "reservation"}


@config
class NodeCheckConfig:
    """The first step of a Slurm job, and `python -m launch doctor`: every machine is checked before the run starts."""

    # Checks to leave out. The shared folder, the interfaces and the head's address are always checked.
    skip: list[Literal["gpus", "driver", "cudnn", "clock", "all_reduce"]] = Field(default_factory=list)
    # Machines that the job asks for in addition. The run takes the first good machines, so that as many bad ones are left out.
    # 0: a bad machine ends the job.
    spare_nodes: NonNegative = 0
    # Least bus bandwidth of the all-reduce over all machines in GB/s. 0: it is only reported.
    min_gb_per_second: Annotated[float, Field(ge=0)] = 0.0
    # Largest difference between a machine's clock and the head's.
    max_clock_seconds: Annotated[float, Field(gt=0)] = 5.0  # not a limit
    # Limit since the first step of a job: an image takes 10 minutes to unpack, PyTorch 10 to import from a cold disk; then the
    # machines that are missing are left out; a start
    timeout_seconds: Annotated[int, Field(ge=10)] = 1800

    def __post_init__(self) -> None:
        if self.min_gb_per_second and "all_reduce" in self.skip:
            raise ValueError(
                f"min_gb_per_second={self.min_gb_per_second} and skip: all_reduce contradict each other; remove one of them"
            )


@config
class SlurmConfig:
    """Options of sbatch and srun.

    Attributes:
        warning_seconds: Seconds before the time limit at which a run is asked to save and end, to be queued again. They have to
            be enough for the update of a step and for a checkpoint.
    """

    account: str
    partition: str | None = None
    qos: str | None = None
    time: str = "04:00:00"
    mem: str | None = None
    exclusive: bool = True
    constraint: str | None = None
    reservation: str | None = None
    # Further options of each `srun`, such as "--container-writable" or "--mpi=none"
    srun_args: list[str] = Field(default_factory=list)
    # Lines of bash that run first in each task, in the container if there is one, such as "module load cuda"
    setup: list[str] = Field(default_factory=list)
    # Limit since the warning before the time limit: a step and a checkpoint, which the launch compares with `tepo plan`; then
    # the job ends without that step
    warning_seconds: Annotated[int, Field(ge=30, le=7200)] = 900
    restarts: NonNegative = 20  # maximum restarts for any reason; 0: never restart
    # Maximum restarts at one checkpoint, or before the first, after a part of the run failed or was killed; 0: the first
    # failure ends the run
    error_restarts: NonNegative = 1
    # Starts in a row that end at the time limit without a new checkpoint, after which the job ends, because no step fits
    # between its start and the warning. 0: no limit.
    idle_starts: NonNegative = 3
    options: dict[str, str] = Field(default_factory=dict)  # further options of sbatch, by name ("mail_type: END")
    # convert, evaluate: options of sbatch for the job of that command ("mem: 128G", "gpus_per_node: '2'"), which then shares
    # its machine with other jobs and gets no GPU but these. None: it takes a whole machine, like a run.
    convert: dict[str, str] | None = None
    evaluate: dict[str, str] | None = None

    def __post_init__(self) -> None:
        times = {"": self.time} | {
            f"{kind}: ": self._of_command(kind).get("time", self.time) for kind in ("convert", "evaluate")
        }
        for where, time in times.items():
            if not re.fullmatch(r"(\d+-)?\d{1,2}:[0-5]\d:[0-5]\d", time):
                raise ValueError(f'{where}time={time!r} is not "HH:MM:SS" or "D-HH:MM:SS"; YAML needs the quotes')
        if self.restarts and self.warning_seconds >= self.seconds:
            raise ValueError(
                f"warning_seconds={self.warning_seconds} is not below time={self.time} ({self.seconds} s); lower it, or raise "
                "time"
            )
        if own := sorted(_OWN_OPTIONS & {name.replace("-", "_") for name in self.options}):
            raise ValueError(f"options: {own[0]} has a key of its own, or is set by launch; remove it there")
        options = [*self.options, *(self.convert or {}), *(self.evaluate or {})]
        if wrong := [name for name in options if not re.fullmatch(r"[A-Za-z][\w-]*", name)]:
            raise ValueError(f"options: {wrong[0]!r} is no name of an option of sbatch; write it without dashes in front")
        for word in self.srun_args:
            if not re.fullmatch(r"--?[A-Za-z][\w-]*(=[\w:,./@%+#=-]*)?", word):
                raise ValueError(f'srun_args: {word!r} is not one option; write "--name" or "--name=value"')
            if (name := word.lstrip("-").partition("=")[0]) in _OWN_SRUN_ARGS:
                raise ValueError(f"srun_args: {name} is set by launch; remove it there")
        if twice := [line for line in self.setup if "\n" in line or not line.strip()]:
            raise ValueError(f"setup: {twice[0]!r} is not one line of bash; give a list of lines")
        for kind in ("convert", "evaluate"):
            self._check_command(kind)

    def _check_command(self, kind: str) -> None:
        asked = self._of_command(kind)
        if own := sorted((_OWN_OPTIONS - _OF_COMMANDS - {"gpus_per_node"}) & asked.keys()):
            raise ValueError(f"{kind}: {own[0]} is set by launch; remove it there")
        if not re.fullmatch(r"\d+", gpus := asked.get("gpus_per_node", "0")):
            raise ValueError(f"{kind}: gpus_per_node={gpus!r} is not a number of GPUs")

    def _of_command(self, kind: str) -> dict[str, str]:
        return {name.replace("-", "_"): value for name, value in (getattr(self, kind) or {}).items()}

    def for_command(self, kind: str) -> tuple[SlurmConfig, int] | None:
        """Return the options for the job of a command that shares a machine, and its GPUs. None: it takes a whole machine."""
        if getattr(self, kind) is None:
            return None
        asked = self._of_command(kind)
        gpus = int(asked.pop("gpus_per_node", "0"))
        inherited = {name.replace("-", "_"): value for name, value in self.options.items()}
        for name in [name for name in inherited if name.startswith(("gres", "gpu", "tres"))]:
            del inherited[name]  # the run's GPUs
        fields: dict[str, Any] = {"mem": None} | {name: asked.pop(name) for name in _OF_COMMANDS & asked.keys()}
        fields |= {
            "exclusive": False,
            "restarts": 0,
            "options": inherited | asked,
            "convert": None,
            "evaluate": None,
        }
        return dataclasses.replace(self, **fields), gpus

    @property
    def cpu_args(self) -> list[str]:
        """Return the option of each `srun` of a job for its CPUs: those of sbatch, which srun does not take over, or else all
        that the job has on a machine. It is shell code, and empty if `srun_args` has the option.
        """
        if any(re.match(r"--cpus-per-task|-c\b", word) for word in self.srun_args):
            return []
        cores = {name.replace("-", "_"): value for name, value in self.options.items()}.get("cpus_per_task")
        return ["--cpus-per-task=" + (shlex.quote(cores) if cores else "$SLURM_CPUS_ON_NODE")]

    @property
    def patience(self) -> int:
        """Return the seconds for which the batch script waits for the run after the warning; Slurm needs the others."""
        return self.warning_seconds - min(_MARGIN_SECONDS, self.warning_seconds // 2)

    @property
    def seconds(self) -> int:
        """Return the time limit in seconds."""
        days, _, clock = self.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
