"""A job for a Ray cluster, as files: its scripts, the plan that launch/on_ray.py follows, and the programs themselves."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.profile import Cluster
from launch.scripts import ENDPOINT, Starts, Task
from launch.sections import KubeRayConfig

# By variables that on_ray.py sets for every start of a job. Addresses are told: a pod's name is known to itself alone.
STARTS = Starts(
    "$LAUNCH_START", '"${LAUNCH_JOB}-${LAUNCH_START}"',
    meet=f'{ENDPOINT} --node-rank "$LAUNCH_MACHINE"', address=f'{Starts.address} --address "$LAUNCH_ADDRESS"',
)  # fmt: skip
# Ray's workers, and what they start, would run at nice 15, be the first that the kernel kills, and be killed by Ray where
# memory is scarce: here one of them is a whole machine's work. Nothing is reported to Ray's makers.
OF_RAY = {
    "RAY_worker_niceness": "0", "RAY_worker_oom_score_adjustment": "0", "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
PLAN, PROGRAM, KEEPER = "plan.json", "on_ray.py", "keep.py"
_NAME_LENGTH = 24  # of the run's in the job's name, which KubeRay lets have 47 letters


@dataclass(frozen=True)
class RayJob:
    """A job of one or several tasks, of which the first one's end is its end.

    home: where its files and logs go, `launch/` of a run's folder; number: of this submission from that folder; goes_on: a run
    with checkpoints, which is started again after a failure.
    """

    name: str
    home: Path
    number: int
    tasks: Sequence[Task]
    cluster: Cluster
    goes_on: bool = False

    @property
    def id(self) -> str:
        """A name that Kubernetes takes, unlike that of any other job: the folder is in it, as a checksum."""
        readable = re.sub(r"[^a-z0-9]+", "-", self.name.lower())[:_NAME_LENGTH].strip("-")
        checksum = hashlib.sha256(str(self.home).encode()).hexdigest()[:6]
        return "-".join(part for part in ("tepo", readable, checksum, str(self.number)) if part)

    @property
    def folder(self) -> Path:
        """Of its files."""
        return self.home / "experiments" / self.name / f"{self.name}_{self.number}"

    @property
    def machines(self) -> int:
        """All of them."""
        return max(task.first + task.nodes for task in self.tasks)

    @property
    def kuberay(self) -> KubeRayConfig:
        """That section of the profile."""
        assert self.cluster.kuberay is not None, "checked before"
        return self.cluster.kuberay

    @property
    def entrypoint(self) -> str:
        """The command that runs on the head, where `python` has Ray; no word of it needs quotes: executors/kuberay.py."""
        return f"python {self.folder / PROGRAM} {self.folder / PLAN}"

    def files(self) -> dict[str, str]:
        """What the entrypoint needs in the job's folder, by name."""
        scripts = {f"{task.name}.sh": f"#!/bin/bash\n{task.script}" for task in self.tasks}
        programs = {name: Path(__file__).with_name(name).read_text() for name in (PROGRAM, KEEPER)}
        return {PLAN: json.dumps(self._plan(), indent=2) + "\n", **scripts, **programs}

    def write(self) -> None:
        """Write them."""
        self.folder.mkdir(parents=True)
        for name, text in self.files().items():
            (self.folder / name).write_text(text)

    def _plan(self) -> dict[str, object]:
        """What on_ray.py reads; paths are absolute. `{machine}` in a log's path becomes its number."""
        scripts = [
            {
                "name": task.name, "path": str(self.folder / f"{task.name}.sh"), "nodes": task.nodes, "first": task.first,
                "log": str(self.home / f"{self.name}-{task.name}-{{machine}}-{self.number}.log"),
            }
            for task in self.tasks
        ]  # fmt: skip
        return {
            "job": self.id,
            "machines": self.machines,
            "gpus": self.cluster.gpus_per_node,
            "port": self.cluster.network.port,
            "wait_seconds": self.kuberay.wait_seconds,
            "restarts": self.kuberay.restarts if self.goes_on else 0,
            "error_restarts": self.kuberay.error_restarts,
            "checkpoints": str(self.home.parent / "checkpoints") if self.goes_on else None,
            "state": str(self.folder / "state.json"),
            "log": str(self.home / f"{self.name}-head-{self.number}.log"),
            "scripts": scripts,
        }
