"""One save in flight: a thread on each rank plans and writes the copied state, until the checkpoint is complete or has failed.

Threads are used, not processes: a fork would inherit the locks of gloo's and CUDA's threads, a spawned process would import the
program again, and either could outlive a killed rank. Writing, checksums and fsync release the interpreter lock, so the
training thread runs meanwhile.
"""

import contextlib
import json
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from tepo_megatron.base.errors import CheckpointError
from tepo_megatron.base.run_lock import FolderIdentity
from tepo_megatron.base.storage import disk_fault
from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint import rng_state
from tepo_megatron.checkpoint.folder import FileChecksum, files_below, read_sum, write, write_manifest
from tepo_megatron.checkpoint.state import ShardSlice
from tepo_megatron.checkpoint.tensors import SavePlanner, Stored, create_folder, pickled, write_items, write_metadata
from tepo_megatron.dist.objects import broadcast_object, gather_object

T = TypeVar("T")

RUN = "run.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint."""

    step: int
    path: Path
    size: int
    blocked_seconds: float
    seconds: float


@dataclass(frozen=True)
class CheckpointContent:
    """The state that one rank writes, copied when the save was requested. Training does not change it."""

    shard_slices: Sequence[ShardSlice]
    objects: Mapping[str, Any]
    rng: str
    rng_states: rng_state.RngStates


@dataclass(frozen=True)
class CommitPlan:
    """The files that rank 0 adds to those of the ranks, and the rules for deleting older checkpoints."""

    common: Mapping[str, Any]
    run: bytes
    refused: str | None
    keep_last: int
    keep_every: int | None
    best: int | None


@dataclass(frozen=True)
class WrittenFile:
    """One rank's file, or the error for which there is none."""

    name: str
    sum: FileChecksum | None = None
    stored: Stored = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class SaveOutcome:
    """Outcome of a save, as one rank knows it. `broken`: whether ranks lost each other, so that no further save is possible."""

    size: int = 0
    error: str | None = None
    broken: bool = False


class PendingSave:
    """One in-flight save, coordinated with the other ranks over a dedicated process group."""

    def __init__(
        self,
        folder: Path,
        step: int,
        content: CheckpointContent,
        commit: CommitPlan | None,
        plans: SavePlanner,
        has_folder: bool,
        started: float,
    ) -> None:
        self.step = step
        self.started, self.begun, self.ended = started, time.perf_counter(), 0.0
        self.outcome: SaveOutcome | None = None
        self._folder, self._partial = folder, folders.partial(folder, step)
        self._commit, self._plans, self._has_folder = commit, plans, has_folder
        self._content: CheckpointContent | None = content
        self._group = plans.group
        self._over = threading.Event()

    def is_over(self) -> bool:
        """Return whether the checkpoint is complete or has failed."""
        return self._over.is_set()

    def wait(self, seconds: float) -> None:
        """Wait until the save has ended, but at most this long."""
        self._over.wait(seconds)

    def run(self) -> None:
        """Write the checkpoint. Errors are stored in `outcome`, not raised."""
        try:
            outcome = self._save_all_ranks()
        except CheckpointError as e:  # on all ranks
            if self._group.rank() == 0:
                _discard(self._partial)
            outcome = SaveOutcome(error=str(e))
        except Exception as e:  # gloo raises many types of errors when a rank is gone or late
            error = f"rank {self._group.rank()}: the ranks lost each other while writing ({e})"
            outcome = SaveOutcome(error=error, broken=True)
        self._content = None  # the copies may be overwritten by the next save
        self.ended = time.perf_counter()
        self.outcome = outcome
        self._over.set()

    def _save_all_ranks(self) -> SaveOutcome:
        content, commit = self._content, self._commit
        assert content is not None
        if not self._has_folder:
            create_folder(self._folder, self.step, commit.refused if commit else None, self._group)
        with contextlib.closing(FolderIdentity(self._partial)) as place:
            return self._write_all(content, commit, place)

    def _write_all(self, content: CheckpointContent, commit: CommitPlan | None, place: FolderIdentity) -> SaveOutcome:
        """Write this rank's file; on rank 0 complete the checkpoint too. `place` identifies the folder of the checkpoint."""
        items, metadata = self._plans.agree(content.shard_slices, (*content.objects, content.rng))
        everything = gather_object(self._write(items, content), self._group)
        outcome = SaveOutcome()
        if commit is not None:
            assert metadata is not None
            outcome = self._conclude(everything, metadata, commit, place)
        return broadcast_object(outcome, self._group)

    def _write(self, items: Sequence[WriteItem], content: CheckpointContent) -> WrittenFile:
        rank = self._group.rank()
        name = f"__{rank}_0.distcp"
        path = self._partial / name
        try:
            if rank == 0:
                folders.sweep(self._folder, writing=self.step)  # first, since the space may be needed
            objects = [pickled([value]) for value in content.objects.values()]  # in a list, as Megatron expects them
            tensors = [shard_slice.data for shard_slice in content.shard_slices]
            values = [*tensors, *objects, rng_state.packed(content.rng_states)]
            return WrittenFile(name, *write_items(path, items, values))
        except Exception as e:
            return WrittenFile(name, error=f"rank {rank}: {path} cannot be written ({_reason(e, self._folder)})")

    def _conclude(
        self, everything: list[WrittenFile], metadata: Metadata, commit: CommitPlan, place: FolderIdentity
    ) -> SaveOutcome:
        partial = self._partial
        if not place.is_in_place():  # the folder at this path belongs to another run: neither publish nor delete it
            return SaveOutcome(error=f"{partial} was removed, moved or replaced while it was written")
        errors = [w.error for w in everything if w.error is not None]
        sums = {w.name: w.sum for w in everything if w.sum is not None}
        if not errors:
            errors += _invisible_files(partial, sums)
        if not errors:
            try:
                sums = _complete(partial, sums, everything, metadata, commit)
                for aside in folders.publish(self._folder, self.step):
                    _log.warning("%s is from a part of this run that was abandoned by a resume, and was set aside", aside)
            except Exception as e:
                errors.append(f"rank 0: {partial} cannot be completed ({_reason(e, self._folder)})")
        if errors:
            _discard(partial)
            return SaveOutcome(error="; ".join(errors))
        try:
            folders.prune(self._folder, commit.keep_last, commit.keep_every, commit.best)
        except OSError as e:  # the new checkpoint is complete nevertheless
            _log.warning("%s: older checkpoints cannot be deleted (%s)", self._folder, e)
        return SaveOutcome(size=sum(s.size for s in sums.values()))


class SavingThread(threading.Thread):
    """A thread that runs tasks one after another. Starting a new thread for each save would block training for longer."""

    def __init__(self) -> None:
        super().__init__(name="checkpoints", daemon=True)  # a save that hangs does not keep the process
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in the thread and return the future of its result."""
        answer: Future[T] = Future()

        def task() -> None:
            try:
                answer.set_result(work())
            except Exception as e:
                answer.set_exception(e)

        self._tasks.put(task)
        return answer

    def begin(self, save: PendingSave) -> None:
        """Run a save after the tasks that were submitted before."""
        self._tasks.put(save.run)

    def end(self) -> None:
        self._tasks.put(None)

    def run(self) -> None:
        """Run the tasks, on the device of the thread that created this one: CUDA starts new threads on the first device."""
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while (task := self._tasks.get()) is not None:
            task()


def _complete(
    partial: Path, sums: Mapping[str, FileChecksum], everything: list[WrittenFile], metadata: Metadata, commit: CommitPlan
) -> dict[str, FileChecksum]:
    """Write all files that do not belong to one rank, the manifest last. Return the checksums of all files."""
    stored = {index: info for w in everything for index, info in w.stored.items()}
    whole = {**sums, **{name: read_sum(partial / name) for name in files_below(partial) if name.startswith("hf/")}}
    whole |= write_metadata(partial, metadata, stored, commit.common)
    whole[RUN] = write(partial / RUN, json.dumps(json.loads(commit.run), indent=1).encode() + b"\n")
    write_manifest(partial, whole)
    return whole


def _discard(partial: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(partial)


def _invisible_files(partial: Path, sums: Mapping[str, FileChecksum]) -> list[str]:
    """Return a message if rank 0 does not see some files in the size in which other ranks wrote them."""
    unseen = [name for name, s in sums.items() if not (partial / name).exists() or (partial / name).stat().st_size != s.size]
    if not unseen:
        return []
    return [f"{partial}: rank 0 does not see {', '.join(unseen)} as written; the run's folder must be shared by all ranks"]


def _reason(error: Exception, folder: Path) -> str:
    if (fault := disk_fault(error, folder)) is not None:
        return fault.partition(": cannot be written: ")[2]
    if not isinstance(error, OSError):
        return repr(error)
    free = shutil.disk_usage(folder).free / 2**20 if folder.exists() else 0.0
    return f"{error.strerror or error}; {free:.0f} MiB free on that disk"
