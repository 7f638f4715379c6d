"""What was started for a folder: `launch/` in it holds the logs, NeMo-Run's files, and a record of the newest job."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tepo_megatron import records
from tepo_megatron.errors import ConfigError
from tepo_megatron.escaping import escaped

_RECORD = "job.json"


@dataclass(frozen=True)
class Job:
    """executor: its name; id: Slurm's number of the job, NAMESPACE/NAME of KubeRay's, that of SkyPilot's managed job, or the
    process of `launch` on `host`.
    """

    executor: str
    id: str
    host: str
    submitted: str


def home_of(folder: Path) -> Path:
    """Where launch keeps what belongs to a run, or to another folder."""
    return folder.absolute() / "launch"


def write(folder: Path, executor: str, job_id: str) -> None:
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


def next_submission(folder: Path) -> tuple[str, Path, int]:
    """Its name, where its files go, and its number: one more than the greatest there."""
    home, name = home_of(folder), folder.absolute().name
    numbers = (path.name.rpartition("_")[2] for path in (home / "experiments" / name).glob(f"{name}_*"))
    return name, home, 1 + max((int(number) for number in numbers if number.isdigit()), default=0)


def submitted(folder: Path, executor: str, job_id: str, what: str = "job") -> int:
    """Record a job, and say how to ask for it; returns the exit status."""
    write(folder, executor, job_id)
    print(f"{what} {job_id}; python -m launch status|logs|cancel {folder}")
    return 0


def progress(folder: Path) -> list[str]:
    """What a run has got to, a line each; none for another folder."""
    lines = []
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        found = records.steps_of(records.read_lines(metrics, "step"))
        ended = ", ended" if (folder / "summary.json").exists() else ""
        lines.append(f"{len(found.kept)} steps recorded{ended}")
        lines += [f"{metrics.name}: {fault}" for fault in found.faults]
    checkpoints = sorted(p.name for p in (folder / "checkpoints").glob("step-*") if p.name.removeprefix("step-").isdigit())
    if checkpoints:
        lines.append(f"newest checkpoint: {checkpoints[-1]}")
    return lines


def ends(folder: Path, paths: Iterable[Path], lines: int) -> str:
    """The ends of these files and of the run's own log, under their names; empty: there is none."""
    found = [path for path in [*paths, folder / "log.txt"] if path.exists()]
    return "\n".join(f"==== {path}\n{_end(path, lines)}" for path in found)


def _end(path: Path, lines: int) -> str:
    with path.open(errors="replace") as file:
        return escaped("".join(deque(file, lines)).rstrip())
