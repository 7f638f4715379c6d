"""What was started for a folder: `launch/` in it holds the logs, NeMo-Run's files, and a record of the newest job."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import time
import warnings
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from tepo_megatron.errors import ConfigError

_RECORD = "job.json"
Executor = Literal["local", "slurm", "kuberay", "skypilot"]


@dataclass(frozen=True)
class Job:
    """id: Slurm's number of the job, NAMESPACE/NAME of KubeRay's, that of SkyPilot's managed job, or the process of `launch`
    on `host`.
    """

    executor: Executor
    id: str
    host: str
    submitted: str


def home_of(folder: Path) -> Path:
    """Where launch keeps what belongs to a run, or to another folder."""
    return folder.absolute() / "launch"


def write(folder: Path, executor: Executor, job_id: str) -> None:
    """Remember a job as the newest of its folder."""
    home = home_of(folder)
    home.mkdir(parents=True, exist_ok=True)
    job = Job(executor, job_id, os.uname().nodename, time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    part = home / f"{_RECORD}.part"
    part.write_text(json.dumps(asdict(job), indent=2) + "\n")
    part.replace(home / _RECORD)


def read(folder: Path) -> Job:
    """The newest job of a folder. Raises ConfigError where there is none."""
    path = home_of(folder) / _RECORD
    try:
        return Job(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise ConfigError(f"{folder}: nothing was launched there; give a run's folder, output/name of its config") from None
    except (OSError, ValueError, TypeError) as e:
        raise ConfigError(f"{path}: not the record of a job ({e}); look for it with squeue, and remove the file") from None


def next_number(home: Path, name: str) -> int:
    """Of the next submission under that name: one more than the greatest there."""
    numbers = (path.name.rpartition("_")[2] for path in (home / "experiments" / name).glob(f"{name}_*"))
    return 1 + max((int(number) for number in numbers if number.isdigit()), default=0)


def status(folder: Path) -> str:
    """The job's state, and the steps of the run if it is one: a line each."""
    job = read(folder)
    lines = [f"{job.executor} job {job.id}, submitted {job.submitted}: {_state(job)}"]
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        records = metrics.read_bytes().count(b"\n")
        ended = ", ended" if (folder / "summary.json").exists() else ""
        lines.append(f"{records} steps recorded{ended}")
    checkpoints = sorted(p.name for p in (folder / "checkpoints").glob("step-*") if p.name.removeprefix("step-").isdigit())
    if checkpoints:
        lines.append(f"newest checkpoint: {checkpoints[-1]}")
    return "\n".join(lines)


def logs(folder: Path, lines: int) -> str:
    """The ends of the newest job's logs, and of the run's own."""
    job = read(folder)
    home = home_of(folder)
    if job.executor == "skypilot":
        return _skypilot().logs(job.id, lines) or f"job {job.id} has no logs yet"
    if job.executor == "slurm":
        paths = sorted(home.glob(f"*-{job.id}.log"))
    elif job.executor == "kuberay":  # whose ids end with the number of the submission
        paths = sorted(home.glob(f"*-{job.id.rpartition('-')[2]}.log"))
        if not paths and (printed := kuberay().said(job.id, lines)):
            return printed
    else:
        newest = max(home.glob("experiments/*/*"), key=lambda path: path.stat().st_mtime)
        paths = sorted(newest.rglob("combined.log"))
    found = [path for path in [*paths, folder / "log.txt"] if path.exists()]
    if not found:
        return f"job {job.id} has no logs yet"
    return "\n".join(f"==== {path}\n{_end(path, lines)}" for path in found)


def cancel(folder: Path) -> str:
    """End the newest job. Raises ConfigError where that cannot be done from here."""
    job = read(folder)
    if job.executor == "slurm":
        ended = _call("scancel", job.id)
        if ended.returncode:
            raise ConfigError(f"scancel {job.id}: {' '.join(ended.stderr.split())}")
        return f"job {job.id} is cancelled"
    if job.executor == "skypilot":
        _skypilot().cancel(job.id)
        return f"managed job {job.id} is cancelled"
    if job.executor == "kuberay":
        kuberay().cancel(job.id)
        return f"job {job.id} is cancelled"
    if job.host != os.uname().nodename:
        raise ConfigError(f"this job runs on {job.host}; call cancel there")
    if not _is_launch(int(job.id)):
        return f"process {job.id} has ended already"
    os.kill(int(job.id), signal.SIGTERM)
    return f"process {job.id} is told to end"


def kuberay() -> ModuleType:
    """launch.kuberay. Raises ConfigError where NeMo-Run or the client of Kubernetes is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NeMo-Run's dependencies warn of each other
            return importlib.import_module("launch.kuberay")
    except ModuleNotFoundError as e:
        raise ConfigError(f"{e.name} is not installed here; `make launch` makes .venv-launch, whose python has it") from None


def _state(job: Job) -> str:
    if job.executor == "local":
        if job.host != os.uname().nodename:
            return f"on {job.host}"
        return "under way" if _is_launch(int(job.id)) else "ended"
    if job.executor == "skypilot":
        return _skypilot().status(job.id)
    if job.executor == "kuberay":
        return kuberay().state(job.id)
    shown = _call("scontrol", "show", "job", "--oneliner", job.id)  # knows jobs until minutes after their end
    if shown.returncode == 0:
        words = dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)
        reason = f" ({words['Reason']})" if words.get("Reason", "None") != "None" else ""
        return f"{words['JobState']}{reason}, {words['RunTime']} of {words['TimeLimit']}, restarts: {words['Restarts']}"
    counted = _call("sacct", "-nXP", "--jobs", job.id, "--format", "State,Elapsed,ExitCode")
    if counted.returncode == 0 and counted.stdout.strip():
        return ", ".join(counted.stdout.split("\n")[0].split("|"))
    return "unknown to scontrol and sacct"


def _skypilot() -> ModuleType:
    """What asks SkyPilot, imported where it is needed."""
    from launch import nemo_sky

    return nemo_sky


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        raise ConfigError(f"{words[0]} is not installed here; call this on a machine of the cluster") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{words[0]} did not answer within 60 s; try again") from None


def _is_launch(pid: int) -> bool:
    """Whether that process lives and is one of ours: numbers are used again."""
    try:
        return b"launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _end(path: Path, lines: int) -> str:
    with path.open(errors="replace") as file:
        return "".join(deque(file, lines)).rstrip()
