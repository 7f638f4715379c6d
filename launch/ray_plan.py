"""Write a job for a Ray cluster as files: its scripts, the plan for launch/on_ray.py, and the programs themselves."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import check_step
from launch.profile import Cluster
from launch.scripts import ENDPOINT, StartVariables, Task, head, joined, text
from launch.sections import KubeRayConfig
from tepo_megatron.utils.save_requests import STOP, STOPPED

# on_ray.py sets these variables for every start of a job. Addresses are passed, because only a pod itself can resolve its name.
STARTS = StartVariables(
    "$LAUNCH_START", '"${LAUNCH_JOB}-${LAUNCH_START}"',
    rendezvous=f'{ENDPOINT} --node-rank "$LAUNCH_MACHINE"',
    address=f'{StartVariables.address} --address "$LAUNCH_ADDRESS"', machine='"$LAUNCH_MACHINE"',
)  # fmt: skip
# By default Ray's workers and their children run at nice 15, are the first that the kernel kills, and are killed by Ray when
# memory is scarce. Here one worker is a whole machine's work. Usage statistics are off.
OF_RAY = {
    "RAY_worker_niceness": "0", "RAY_worker_oom_score_adjustment": "0", "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
_CHECK = "check.sh"
PLAN, PROGRAM, SUPERVISOR = "plan.json", "on_ray.py", "supervise.py"
_NAME_LENGTH = 24  # characters of the run's name in the job's name, which KubeRay limits to 47


@dataclass(frozen=True)
class RayJob:
    """A job of one or several tasks. It ends when the first task ends.

    Attributes:
        home: Folder for its files and logs, `launch/` in the run's folder.
        number: Number of this submission from that folder.
        resumes: True for a run with checkpoints, which is restarted after a failure.
        gpus: GPUs that the node check expects on each machine. None: no check.
    """

    name: str
    home: Path
    number: int
    tasks: Sequence[Task]
    cluster: Cluster
    resumes: bool = False
    gpus: int | None = None

    @property
    def id(self) -> str:
        """Return a name valid in Kubernetes and unique to this job; it contains a checksum of the folder."""
        readable = re.sub(r"[^a-z0-9]+", "-", self.name.lower())[:_NAME_LENGTH].strip("-")
        checksum = hashlib.sha256(str(self.home).encode()).hexdigest()[:6]
        return "-".join(part for part in ("tepo", readable, checksum, str(self.number)) if part)

    @property
    def folder(self) -> Path:
        """Return the folder of the job's files."""
        return self.home / "experiments" / self.name / f"{self.name}_{self.number}"

    @property
    def machines(self) -> int:
        """Return the number of machines."""
        return max(task.first + task.nodes for task in self.tasks)

    @property
    def kuberay(self) -> KubeRayConfig:
        """Return the `kuberay` section of the profile."""
        assert self.cluster.kuberay is not None, "checked before"
        return self.cluster.kuberay

    @property
    def entrypoint(self) -> str:
        """Return the command for the head, whose `python` has Ray. executors/kuberay.py checks that no word needs quotes."""
        return f"python {self.folder / PROGRAM} {self.folder / PLAN}"

    def before_the_end(self, program: str) -> str:
        """Return the script that a pod runs before it is ended. It asks the run to save and end, and waits until it has.

        At the end of the job, and in a pod in which nothing of the run is left, the script ends at once.
        """
        stop, stopped = self.home.parent / STOP, self.home.parent / STOPPED
        runs = f"grep -qs '{program.replace('.', '[.]')}' /proc/[0-9]*/cmdline"  # with brackets it does not find itself
        if program == PROGRAM:  # it goes on after the end of the run
            return f"while [ ! -e {stopped} ] && {runs}; do touch {stop}; sleep 1; done"
        return f"while {runs}; do [ -e {stopped} ] || touch {stop}; sleep 1; done"

    def files(self) -> dict[str, str]:
        """Return name -> content of the files that the entrypoint needs in the job's folder."""
        scripts = {f"{task.name}.sh": f"#!/bin/bash\n{task.script}" for task in self.tasks}
        names = (PROGRAM, SUPERVISOR) if self.gpus is None else (PROGRAM, SUPERVISOR, "node_check.py", "node_facts.py")
        programs = {name: Path(__file__).with_name(name).read_text() for name in names}
        if self.gpus is not None:
            scripts[_CHECK] = f"#!/bin/bash\n{self._check(self.gpus)}"
        return {PLAN: json.dumps(self._plan(), indent=2) + "\n", **scripts, **programs}

    def write(self) -> None:
        """Write the files."""
        self.folder.mkdir(parents=True)
        for name, content in self.files().items():
            (self.folder / name).write_text(content)

    def _planned(self, name: str, nodes: int, first: int) -> dict[str, object]:
        """Return the plan of a script."""
        log = self.home / f"{self.name}-{name}-{{machine}}-{self.number}.log"
        return {"name": name, "path": str(self.folder / f"{name}.sh"), "nodes": nodes, "first": first, "log": str(log)}

    def _check(self, gpus: int) -> str:
        """Return the script that checks one machine."""
        program = joined([self.cluster.python, str(self.folder / check_step.CHECK)])
        place = '--folder "$LAUNCH_CHECK" --names $LAUNCH_NAMES --name "machine-$LAUNCH_MACHINE"'
        words = joined(check_step.check_words(self.cluster, self.machines, gpus))
        return text([*head(Path.cwd()), f"exec {program} {place} {words}"])

    def _plan(self) -> dict[str, object]:
        """Return the plan for on_ray.py. Paths are absolute; `{machine}` in a log path stands for the machine's index."""
        scripts = [self._planned(task.name, task.nodes, task.first) for task in self.tasks]
        return {
            "job": self.id,
            "machines": self.machines,
            "gpus": self.cluster.gpus_per_node or 0,
            "port": self.cluster.network.port or 0,
            "wait_seconds": self.kuberay.wait_seconds,
            "restarts": self.kuberay.restarts if self.resumes else 0,
            "error_restarts": self.kuberay.error_restarts,
            "idle_starts": self.kuberay.idle_starts,
            "checkpoints": str(self.home.parent / "checkpoints") if self.resumes else None,
            "check": None if self.gpus is None else self._planned("check", self.machines, 0),
            "state": str(self.folder / "state.json"),
            "log": str(self.home / f"{self.name}-head-{self.number}.log"),
            "scripts": scripts,
        }
