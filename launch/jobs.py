"""Record the jobs started for a folder. Its `launch/` holds the logs, NeMo-Run's files, and a record of the newest job."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tepo_megatron.errors import ConfigError
from tepo_megatron.utils import records
from tepo_megatron.utils.atomic import replace_file
from tepo_megatron.utils.escaping import escaped

_RECORD = "job.json"


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job.

    Attributes:
        executor: Name of the executor.
        id: Slurm's job number, KubeRay's NAMESPACE/NAME, the number of SkyPilot's managed job, or the pid of `launch` on
            `host`.
        host: Machine where `launch` was called.
        submitted: Time of submission.
    """

    executor: str
    id: str
    host: str
    submitted: str


def launch_folder(folder: Path) -> Path:
    """Return the folder in which launch keeps the files that belong to a run or to another folder."""
    return folder.absolute() / "launch"


def write(folder: Path, executor: str, job_id: str) -> None:
    """Record a job as the newest of its folder.

    Args:
        folder: The folder.
        executor: Name of the executor.
        job_id: `SubmittedJob.id`.
    """
    home = launch_folder(folder)
    home.mkdir(parents=True, exist_ok=True)
    job = SubmittedJob(executor, job_id, os.uname().nodename, time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    replace_file(home / _RECORD, json.dumps(asdict(job), indent=2).encode() + b"\n", durable=False)


def read(folder: Path) -> SubmittedJob:
    """Return the newest job of a folder. Raise ConfigError if there is none."""
    path = launch_folder(folder) / _RECORD
    try:
        return SubmittedJob(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise ConfigError(f"{folder}: nothing was launched there; give a run's folder, output/name of its config") from None
    except (OSError, ValueError, TypeError) as e:
        raise ConfigError(f"{path}: not the record of a job ({e}); look for it with squeue, and remove the file") from None


def next_submission(folder: Path) -> tuple[str, Path, int]:
    """Return the name of the next submission, the folder for its files, and its number (one more than the greatest so far)."""
    home, name = launch_folder(folder), folder.absolute().name
    numbers = (path.name.rpartition("_")[2] for path in (home / "experiments" / name).glob(f"{name}_*"))
    return name, home, 1 + max((int(number) for number in numbers if number.isdigit()), default=0)


def submitted(folder: Path, executor: str, job_id: str, what: str = "job") -> int:
    """Record a job and print the commands to ask for it.

    Args:
        folder: The folder.
        executor: Name of the executor.
        job_id: `SubmittedJob.id`.
        what: The executor's word for a job.

    Returns:
        The exit status 0.
    """
    write(folder, executor, job_id)
    print(f"{what} {job_id}; python -m launch status|logs|cancel {folder}")
    return 0


def progress(folder: Path) -> list[str]:
    """Return the progress of a run, in lines of text; empty for another folder."""
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


def log_tails(folder: Path, paths: Iterable[Path], lines: int) -> str:
    """Return the last lines of some files and of the run's own log, under their names; empty if none exists.

    Args:
        folder: Folder of the run.
        paths: The files.
        lines: Number of lines of each file.
    """
    found = [path for path in [*paths, folder / "log.txt"] if path.exists()]
    return "\n".join(f"==== {path}\n{_log_tail(path, lines)}" for path in found)


def _log_tail(path: Path, lines: int) -> str:
    with path.open(errors="replace") as file:
        return escaped("".join(deque(file, lines)).rstrip())
