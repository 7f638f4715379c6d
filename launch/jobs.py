"""Record the jobs started for a folder. Its `launch/` holds the logs, NeMo-Run's files, and a folder for each job."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launch import snapshot
from launch.snapshot import CodeVersion
from tepo_megatron.base import records
from tepo_megatron.base.errors import ConfigError, escaped
from tepo_megatron.base.run_lock import RunLock
from tepo_megatron.base.storage import replace_file

_RECORD, _CONFIG, _CODE, PACKAGES = "job.json", "config.yaml", "code.json", "packages.json"
_RANKS_SHOWN = 4  # logs of ranks that are printed without --rank
# Programs that machines run from the job's folder, because an installation there may have no launch/.
PROGRAMS = ("node_check.py", "node_facts.py", "packages.py")


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job."""

    executor: str
    id: str  # Slurm's job number, or the pid of `launch` on `host`
    host: str  # machine where `launch` was called
    submitted: str
    number: int
    # Words that start an interactive shell in the job's environment on one of its machines. Empty: there are none.
    shell: tuple[str, ...] = ()
    ended: bool = False


@dataclass(frozen=True)
class LogSelection:
    """The part of a job's logs to print."""

    lines: int = 40
    node: str | None = None  # only the logs of this machine: its name or its index in the job. None: all machines.
    rank: int | None = None  # only the log of this rank, which is not rank 0. None: all ranks.


@dataclass(frozen=True)
class JobFolder:
    """The folder of one submission, `launch/jobs/NUMBER` in the folder of a run or of a command."""

    run: Path  # folder of the run or command, absolute
    number: int
    code: Path | None = None  # snapshot of the code that the job imports. None: there is none.

    @property
    def name(self) -> str:
        """Return the name of the job."""
        return self.run.name

    @property
    def home(self) -> Path:
        """Return the folder of all files of launch."""
        return launch_folder(self.run)

    @property
    def path(self) -> Path:
        """Return the folder of the files of this submission."""
        return self.home / "jobs" / str(self.number)

    @property
    def config(self) -> str:
        """Return the path of the config that the job's processes read."""
        return str(self.path / _CONFIG)

    @property
    def packages(self) -> list[str]:
        """Return the words that record the packages of the machine's environment, after those of its Python."""
        return [str(self.path / "packages.py"), str(self.path / PACKAGES)]

    def shell_lines(self) -> tuple[str, ...]:
        """Return the lines of a script that set the job's code, and the folder for the logs of its ranks."""
        return (*snapshot.shell_lines(self.code), f"export TEPO_RANK_LOGS={shlex.quote(str(self.path))}")

    def create(self, config: str | None = None, about: Mapping[str, object] | None = None) -> None:
        """Create the folder with everything that the job reads from it. Raise ConfigError if it exists or cannot be written."""
        try:
            self.path.mkdir(parents=True)
            for name in PROGRAMS:
                (self.path / name).write_text(Path(__file__).with_name(name).read_text())
            if config is not None:
                Path(self.config).write_text(config)
            if about is not None:
                (self.path / _CODE).write_text(json.dumps(about, indent=2) + "\n")
        except FileExistsError:
            raise ConfigError(f"{self.path}: another submission of {self.name} is being made; look at its status") from None
        except OSError as e:
            raise ConfigError(f"{self.path} cannot be written ({e}); choose another `output`") from None

    def has_run(self) -> bool:
        """Return whether a process of the job has written into the folder."""
        return any(self.path.glob("rank-*.log")) or (self.path / PACKAGES).exists()

    def remove(self) -> None:
        """Remove the folder of a submission that was refused or killed."""
        shutil.rmtree(self.path, ignore_errors=True)

    def record(self, executor: str, job_id: str, shell: Sequence[str] = ()) -> None:
        """Record the job that was submitted."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.run, SubmittedJob(executor, job_id, os.uname().nodename, when, self.number, tuple(shell)))

    def submitted(self, executor: str, job_id: str, what: str = "job", shell: Sequence[str] = ()) -> int:
        """Record a job and print the commands to ask for it. Return the exit status 0."""
        self.record(executor, job_id, shell)
        shown = os.path.relpath(self.run) if self.run.is_relative_to(Path.cwd()) else self.run
        print(f"{what} {job_id}; python -m launch status|logs|cancel|attach {shown}")
        return 0


def launch_folder(folder: Path) -> Path:
    """Return the folder in which launch keeps the files that belong to a run or to another folder."""
    return folder.absolute() / "launch"


def next_job(folder: Path, code: CodeVersion | None = None) -> JobFolder:
    """Return the folder of the next submission, whose number is one more than the greatest so far. Nothing is written."""
    home, name = launch_folder(folder), folder.absolute().name
    nemo = (path.name.rpartition("_")[2] for path in (home / "experiments" / name).glob(f"{name}_*"))  # refused ones, too
    number = 1 + max([*_numbers(folder), *(int(number) for number in nemo if number.isdigit())], default=0)
    return JobFolder(folder.absolute(), number, None if code is None else code.folder(home))


def unrecorded(folder: Path) -> list[JobFolder]:
    """Return the folders of submissions that ended before they recorded a job, oldest first."""
    found = [JobFolder(folder.absolute(), number) for number in _numbers(folder)]
    return [slot for slot in found if not (slot.path / _RECORD).exists()]


@contextlib.contextmanager
def submitting(folder: Path, executor: str, find: Callable[[JobFolder], str | None]) -> Iterator[None]:
    """Hold the lock of a folder's submissions. Raise ConfigError if another submission holds it.

    First of all it records or removes what a killed `launch` left: a job that the scheduler took, or a folder without a job.
    """
    with RunLock(launch_folder(folder), what=f"a submission of {folder.absolute().name}") as lock:
        lock.sign()
        _clean_up(folder, executor, find)
        yield


def _clean_up(folder: Path, executor: str, find: Callable[[JobFolder], str | None]) -> None:
    for slot in unrecorded(folder):
        if id := find(slot):
            slot.record(executor, id)
            said = f"job {slot.number} ({executor} job {id}) was submitted by a `launch` that was killed; it is recorded now"
            print(f"launch: {slot.run}: {said}", file=sys.stderr)
        elif not slot.has_run():
            slot.remove()


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (launch_folder(folder) / "jobs").glob("*") if path.name.isdigit())


def read(folder: Path, number: int | None = None) -> SubmittedJob:
    """Return a job of a folder, without a number the newest. Raise ConfigError if there is none."""
    found = submitted_jobs(folder)
    if not found:
        raise ConfigError(f"{folder}: nothing was launched there; give a run's folder, output/name of its config")
    if number is None:
        return found[-1]
    for job in found:
        if job.number == number:
            return job
    there = ", ".join(f"{job.number} ({job.executor} job {job.id})" for job in found)
    raise ConfigError(f"--job {number}: {folder} has no such job; it has {there}")


def refuse_unfinished(folder: Path, has_ended: Callable[[SubmittedJob], bool]) -> None:
    """Raise ConfigError if a job of the folder is in the queue or runs."""
    for job in reversed(submitted_jobs(folder)):
        if job.ended:
            continue
        if not has_ended(job):
            raise ConfigError(
                f"{folder}: job {job.number} of this run ({job.executor} job {job.id}) has not ended; wait for its end, cancel "
                f"it with `python -m launch cancel {folder} --job {job.number}`, or choose another `name`"
            )
        _write(folder, replace(job, ended=True))


def _write(folder: Path, job: SubmittedJob) -> None:
    path = launch_folder(folder) / "jobs" / str(job.number) / _RECORD
    replace_file(path, json.dumps(asdict(job), indent=2).encode() + b"\n", durable=False)


def submitted_jobs(folder: Path) -> list[SubmittedJob]:
    """Return all jobs of a folder that were submitted, oldest first. Raise ConfigError for a record that cannot be read."""
    paths = [launch_folder(folder) / "jobs" / str(number) / _RECORD for number in _numbers(folder)]
    return [_read(path) for path in paths if path.exists()]  # without a record, the submission was refused


def _read(path: Path) -> SubmittedJob:
    try:
        job = SubmittedJob(**json.loads(path.read_text()))
        return replace(job, shell=tuple(job.shell))
    except (OSError, ValueError, TypeError) as e:
        raise ConfigError(f"{path}: not the record of a job ({e}); look for it with squeue, and remove the file") from None


def progress(folder: Path) -> list[str]:
    """Return the progress of a run, in lines of text; empty for another folder."""
    lines = []
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        found = records.steps_of(records.read_lines(metrics))
        ended = ", ended" if (folder / "summary.json").exists() else ""
        lines.append(f"{len(found.kept)} steps recorded{ended}")
        lines += [f"{metrics.name}: {fault}" for fault in found.faults]
    checkpoints = sorted(p.name for p in (folder / "checkpoints").glob("step-*") if p.name.removeprefix("step-").isdigit())
    if checkpoints:
        lines.append(f"newest checkpoint: {checkpoints[-1]}")
    return lines


def log_tails(folder: Path, job: SubmittedJob, paths: Iterable[Path], selection: LogSelection) -> str:
    """Return the last lines of a job's logs under their names: those of its machines and ranks, and the run's own."""
    of_ranks = launch_folder(folder) / "jobs" / str(job.number)
    if selection.rank is not None:
        chosen = [of_ranks / f"rank-{selection.rank}.log"]
    elif selection.node is not None:
        ends = (f"-{selection.node}", f"-{selection.node}-{job.number}")
        index = f"-{job.id}-{selection.node}-"  # Slurm's indices
        chosen = [path for path in paths if path.stem.endswith(ends) or index in path.stem]
    else:
        written = [path for path in of_ranks.glob("rank-*.log") if path.stat().st_size]
        newest = sorted(written, key=lambda path: path.stat().st_mtime)[-_RANKS_SHOWN:]
        chosen = [*paths, *sorted(newest), folder / "log.txt"]
    return "\n".join(f"==== {path}\n{_log_tail(path, selection.lines)}" for path in chosen if path.exists())


def _log_tail(path: Path, lines: int) -> str:
    with path.open(errors="replace") as file:
        return escaped("".join(deque(file, lines)).rstrip())
