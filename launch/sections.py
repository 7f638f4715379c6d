"""Profile sections: `node_check`, and those of individual executors. launch/profile.py has the rest of a profile."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tepo_megatron.config.fields import NonNegative, Positive, config

# NeMo-Run replaces this text everywhere in the scripts that it writes.
_RESERVED = "/nemo_run"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # names of Kubernetes objects
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?|Ki)?")
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
    """The first step of a Slurm job, and `python -m launch doctor`: every machine is checked before the run starts.

    Attributes:
        skip: Checks to leave out. The shared folder, the interfaces and the head's address are always checked.
        spare_nodes: Machines that the job asks for in addition. The run takes the first good machines, so that as many bad
            ones are left out. 0: a bad machine ends the job.
        min_gb_per_second: Least bus bandwidth of the all-reduce over all machines in GB/s. 0: it is only reported.
        max_clock_seconds: Largest difference between a machine's clock and the head's.
        timeout_seconds: Time for the whole check, the start of the container on each machine included.
    """

    skip: list[Literal["gpus", "driver", "cudnn", "clock", "all_reduce"]] = Field(default_factory=list)
    spare_nodes: NonNegative = 0
    min_gb_per_second: Annotated[float, Field(ge=0)] = 0.0
    max_clock_seconds: Annotated[float, Field(gt=0)] = 5.0
    timeout_seconds: Annotated[int, Field(ge=10)] = 300

    def __post_init__(self) -> None:
        if self.min_gb_per_second and "all_reduce" in self.skip:
            raise ValueError(
                f"min_gb_per_second={self.min_gb_per_second} and skip: all_reduce contradict each other; remove one of them"
            )


@config
class SlurmConfig:
    """Options of sbatch and srun.

    Attributes:
        srun_args: Further options of each `srun`, such as "--container-writable" or "--mpi=none".
        setup: Lines of bash that run first in each task, in the container if there is one, such as "module load cuda".
        warning_seconds: Seconds before the time limit at which a run is asked to save and end, to be queued again. They have to
            be enough for the update of a step and for a checkpoint.
        restarts: Maximum restarts for any reason; 0: never restart.
        error_restarts: Maximum restarts at one checkpoint, or before the first, after a part of the run failed or was killed;
            0: the first failure ends the run.
        idle_starts: Starts in a row that end at the time limit without a new checkpoint, after which the job ends, because
            no step fits between its start and the warning. 0: no limit.
        options: Further options of sbatch, by name ("mail_type: END").
        convert, evaluate: Options of sbatch for the job of that command ("mem: 128G", "gpus_per_node: '2'"), which then shares
            its machine with other jobs and gets no GPU but these. None: it takes a whole machine, like a run.
    """

    account: str
    partition: str | None = None
    qos: str | None = None
    time: str = "04:00:00"
    mem: str | None = None
    exclusive: bool = True
    constraint: str | None = None
    reservation: str | None = None
    srun_args: list[str] = Field(default_factory=list)
    setup: list[str] = Field(default_factory=list)
    warning_seconds: Annotated[int, Field(ge=30, le=7200)] = 900
    restarts: NonNegative = 20
    error_restarts: NonNegative = 1
    idle_starts: NonNegative = 3
    options: dict[str, str] = Field(default_factory=dict)
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
        gpus, srun_args = int(asked.pop("gpus_per_node", "0")), list(self.srun_args)
        if cores := asked.get("cpus_per_task"):
            srun_args.append(f"--cpus-per-task={cores}")  # srun does not take it from sbatch
        inherited = {name.replace("-", "_"): value for name, value in self.options.items()}
        for name in [name for name in inherited if name.startswith(("gres", "gpu", "tres"))]:
            del inherited[name]  # the run's GPUs
        fields: dict[str, Any] = {"mem": None} | {name: asked.pop(name) for name in _OF_COMMANDS & asked.keys()}
        fields |= {
            "exclusive": False,
            "restarts": 0,
            "srun_args": srun_args,
            "options": inherited | asked,
            "convert": None,
            "evaluate": None,
        }
        return dataclasses.replace(self, **fields), gpus

    @property
    def seconds(self) -> int:
        """Return the time limit in seconds."""
        days, _, clock = self.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


@config
class BucketConfig:
    """A bucket of an object store, at a path of the machines.

    Attributes:
        name: Name of a bucket, created if it does not exist.
        source: Instead of `name`: an existing bucket with a folder of it ("s3://bucket/folder").
        store: s3, gcs, azure, r2, ...; None: that of the source, or of the cloud.
        mode: MOUNT_CACHED keeps written files on the machine's disk and uploads them in the background. MOUNT uploads at once,
            and supports neither rename nor append. COPY is a copy made at each start, which is never uploaded.
    """

    name: str | None = None
    source: str | None = None
    store: str | None = None
    mode: Literal["MOUNT_CACHED", "MOUNT", "COPY"] = "MOUNT"

    def __post_init__(self) -> None:
        if (self.name is None) == (self.source is None):
            raise ValueError("give name, a bucket's, or source, the URL of one with a folder; not both")


@config
class SkypilotConfig:
    """Properties of SkyPilot's machines, which are all alike.

    Attributes:
        infra: Location: "k8s/CONTEXT", "aws/us-east-1", ...
        workdir: Base of the run's relative paths, below a path of volumes or storage.
        gpu: SkyPilot's name of the GPU (`sky gpus list`).
        cpus, memory: Number and GB, exact or, with a "+", at least.
        network_tier: "best" requests the fastest network between machines.
        volumes: Path on the machines -> SkyPilot volume (`sky volumes`), which the machines share.
        storage: Path on the machines -> bucket.
        setup: Lines of bash that each machine runs at each start before the run.
        error_restarts: Maximum restarts of a run that ended with an error. Lost machines always cause a restart.
    """

    infra: str
    workdir: str
    gpu: str | None = None
    cpus: str | None = None
    memory: str | None = None
    disk_size: Positive | None = None
    use_spot: bool = False
    network_tier: Literal["standard", "best"] | None = None
    volumes: dict[str, str] = Field(default_factory=dict)
    storage: dict[str, BucketConfig] = Field(default_factory=dict)
    setup: list[str] = Field(default_factory=list)
    error_restarts: NonNegative = 1

    def __post_init__(self) -> None:
        for path in (*self.volumes, *self.storage, self.workdir):
            if not re.fullmatch(r"(/[\w.-]+)+", path) or ".." in path or reserved(Path(path)):
                raise ValueError(f"{path!r} is no path for volumes, storage or workdir: absolute, of letters, digits, _ . -")
        if twice := sorted(set(self.volumes) & set(self.storage)):
            raise ValueError(f"{twice[0]} is given twice, by volumes and storage; remove one of them")
        if (kind := self.kind_of(self.workdir)) not in ("volume", "MOUNT_CACHED"):
            where = "on the machine's own disk, which is lost with it" if kind is None else f"on a bucket of mode {kind}"
            raise ValueError(
                f"workdir={self.workdir} is {where}, and holds the runs; put it below a path of volumes, or of storage with "
                "mode: MOUNT_CACHED"
            )

    def kind_of(self, path: str | Path) -> Literal["volume", "MOUNT_CACHED", "MOUNT", "COPY"] | None:
        """Return the storage of a path on the machines: that of the nearest mount above it; None: the machine's own disk.

        Relative paths are relative to workdir.
        """
        found = Path(self.workdir, path)
        for above in (str(found), *map(str, found.parents)):
            if above in self.volumes:
                return "volume"
            if above in self.storage:
                return self.storage[above].mode
        return None


@config
class Toleration:
    """Toleration of a taint on the machines, as in a Kubernetes manifest."""

    key: str
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


@config
class KubeRayConfig:
    """Properties of KubeRay's cluster: a head without GPUs, and one worker for each machine of the job.

    Attributes:
        claims: PersistentVolumeClaim -> mount path. The path must be that of the same files where `launch` is called.
        cpu, memory: Of each worker; its /dev/shm is part of its memory.
        ray_version: Version of Ray in the image.
        devices: Further devices of each worker, such as RDMA adapters -> how many.
        head_node_selector, head_tolerations: Of the head and of the pod that submits the job.
        labels: Labels of the RayJob and of all pods, such as Kueue's queue-name or KAI's queue.
        annotations: Annotations of the workers, such as Multus' networks.
        scheduler: schedulerName of all pods, such as kai-scheduler. None: the cluster's default.
        priority_class: priorityClassName of all pods. None: the cluster's default.
        host_network: Workers use their machine's network instead of the pods'.
        capabilities: Linux capabilities of the workers, such as IPC_LOCK, which RDMA needs for users other than root.
        user, group: User and group of the processes. None: the image's.
        secret: Kubernetes Secret whose keys are the names under `secrets`.
        grace_seconds: Seconds that a run gets to save when a pod of it is deleted or evicted (terminationGracePeriodSeconds).
            0: none.
        wait_seconds: Maximum wait for machines, at the start and after each failure.
        restarts: Maximum restarts of a run for any reason.
        error_restarts: Maximum restarts at one checkpoint, or before the first one.
        idle_starts: Starts in a row whose pods are taken away before they have a new checkpoint, after which the job ends.
            0: no limit.
    """

    claims: dict[str, str]
    cpu: str
    memory: str
    namespace: str = "default"
    ray_version: str = "2.60.0"
    head_cpu: str = "2"
    head_memory: str = "8Gi"
    devices: dict[str, Positive] = Field(default_factory=dict)
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: list[Toleration] = Field(default_factory=list)
    head_node_selector: dict[str, str] = Field(default_factory=dict)
    head_tolerations: list[Toleration] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    scheduler: str | None = None
    priority_class: str | None = None
    host_network: bool = False
    capabilities: list[str] = Field(default_factory=list)
    user: Positive | None = None
    group: Positive | None = None
    secret: str | None = None
    grace_seconds: NonNegative = 300
    wait_seconds: Annotated[int, Field(ge=1)] = 3600
    restarts: NonNegative = 20
    error_restarts: NonNegative = 1
    idle_starts: NonNegative = 3

    def __post_init__(self) -> None:
        for key in ("cpu", "memory", "head_cpu", "head_memory"):
            if not _QUANTITY.fullmatch(getattr(self, key)):
                raise ValueError(f'{key}={getattr(self, key)!r} is no quantity of Kubernetes, as "32", "500m" or "512Gi"')
        names = {"namespace": self.namespace, "secret": self.secret} | {f"claims.{name}": name for name in self.claims}
        for key, name in names.items():
            if name is not None and not _LABEL.fullmatch(name):
                raise ValueError(f"{key}: {name!r} is no name of Kubernetes: small letters, digits, dots and dashes")
        if not self.claims:
            raise ValueError("claims: name the PersistentVolumeClaim that holds the working directory, and its mount path")
        for name, path in self.claims.items():
            if not re.fullmatch(r"(/[\w.-]+)+", path) or path == "/dev/shm":
                raise ValueError(f"claims.{name}: {path!r} is not an absolute path that a volume can be mounted at")
        for label, value in self.labels.items():
            if not _LABEL_KEY.fullmatch(label) or not re.fullmatch(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?", value):
                raise ValueError(f"labels: {label}: {value!r} is no label of Kubernetes; see its rules for keys and values")
        for name in self.capabilities:
            if not re.fullmatch(r"[A-Z]+(_[A-Z]+)*", name) or name.startswith("CAP_"):
                raise ValueError(f"capabilities: {name!r} is no capability as Kubernetes writes it, as IPC_LOCK, without CAP_")
        if twice := sorted(path for path in set(self.claims.values()) if list(self.claims.values()).count(path) > 1):
            raise ValueError(f"claims: {twice[0]} is the path of two; give each its own")


def reserved(path: Path) -> bool:
    """Return whether NeMo-Run would corrupt this path in its scripts."""
    return _RESERVED in str(path)
