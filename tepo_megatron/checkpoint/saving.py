"""A save under way: a thread on each rank plans and writes what was copied, until the checkpoint is complete or has failed.

Threads, not processes: a fork would carry along the locks of gloo's and CUDA's threads, a spawned process would import the
program anew, and either could outlive a killed rank. Writing, summing and fsync leave the interpreter to the training thread.
"""

from __future__ import annotations

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

from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint import rng_state
from tepo_megatron.checkpoint.files import FileSum, files_below, read_sum, write, write_manifest
from tepo_megatron.checkpoint.planning import SavePlanner, make_room
from tepo_megatron.checkpoint.state import ShardSlice
from tepo_megatron.checkpoint.tensors import Stored, pickled, write_items, write_metadata
from tepo_megatron.distributed.objects import broadcast_object, gather_object
from tepo_megatron.errors import CheckpointError
from tepo_megatron.utils.run_lock import FolderIdentity
from tepo_megatron.utils.storage import disk_fault

T = TypeVar("T")

RUN = "run.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint.

    size: bytes of all its files; blocked_seconds: how long this rank's training waited for it; seconds: from the call of `save`
    until it was complete.
    """

    step: int
    path: Path
    size: int
    blocked_seconds: float
    seconds: float


@dataclass(frozen=True)
class CheckpointContent:
    """What one rank writes, as it was when the save was asked for. Training reaches none of it.

    shard_slices: with their data in host memory; objects: to be pickled, by name; rng_states: of this rank, saved under the name
    `rng`.
    """

    shard_slices: Sequence[ShardSlice]
    objects: Mapping[str, Any]
    rng: str
    rng_states: rng_state.States


@dataclass(frozen=True)
class Commit:
    """What rank 0 adds to the ranks' files, and which older checkpoints stay.

    run: the content of run.json, on one line; refused: why there is none, and the checkpoint cannot be begun; best: a step
    whose checkpoint stays.
    """

    common: Mapping[str, Any]
    run: bytes
    refused: str | None
    keep_last: int
    keep_every: int | None
    best: int | None


@dataclass(frozen=True)
class Written:
    """One rank's file, or why there is none."""

    name: str
    sum: FileSum | None = None
    stored: Stored = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, as one rank knows it. error: None when the checkpoint is complete; broken: ranks lost each other."""

    size: int = 0
    error: str | None = None
    broken: bool = False


class Save:
    """One checkpoint, written with the fellows on the other ranks, over a group that nobody else uses."""

    def __init__(
        self,
        folder: Path,
        step: int,
        content: CheckpointContent,
        commit: Commit | None,
        plans: SavePlanner,
        room: bool,
        started: float,
    ) -> None:
        """commit: on rank 0 only; room: its folder is there; started: `time.perf_counter()` when the save was asked for."""
        self.step = step
        self.started, self.begun, self.ended = started, time.perf_counter(), 0.0  # begun: once the former save was over
        self.outcome: SaveOutcome | None = None  # None until it is over
        self._folder, self._partial = folder, folders.partial(folder, step)
        self._commit, self._plans, self._room = commit, plans, room
        self._content: CheckpointContent | None = content
        self._group = plans.group
        self._over = threading.Event()

    def is_over(self) -> bool:
        """Whether it is complete or has failed."""
        return self._over.is_set()

    def wait(self, seconds: float) -> None:
        """Until it is over, or for so long."""
        self._over.wait(seconds)

    def run(self) -> None:
        """Nothing is raised: see `outcome`."""
        try:
            outcome = self._together()
        except CheckpointError as e:  # on all ranks
            if self._group.rank() == 0:
                _discard(self._partial)
            outcome = SaveOutcome(error=str(e))
        except Exception as e:  # whatever gloo raises when a rank is gone or late
            outcome = SaveOutcome(
                error=f"rank {self._group.rank()}: the ranks lost each other while writing ({e})", broken=True
            )
        self._content = None  # the copies may be overwritten by the next save
        self.ended = time.perf_counter()
        self.outcome = outcome
        self._over.set()

    def _together(self) -> SaveOutcome:
        content, commit = self._content, self._commit
        assert content is not None
        if not self._room:
            make_room(self._folder, self.step, commit.refused if commit else None, self._group)
        place = FolderIdentity(self._partial)
        try:
            return self._write_all(content, commit, place)
        finally:
            place.close()

    def _write_all(self, content: CheckpointContent, commit: Commit | None, place: FolderIdentity) -> SaveOutcome:
        """Write this rank's file; on rank 0 complete the checkpoint too. place: the folder that it is written to."""
        items, metadata = self._plans.agree(content.shard_slices, (*content.objects, content.rng))
        everything = gather_object(self._write(items, content), self._group)
        outcome = SaveOutcome()
        if commit is not None:
            assert metadata is not None
            outcome = self._conclude(everything, metadata, commit, place)
        return broadcast_object(outcome, self._group)

    def _write(self, items: Sequence[WriteItem], content: CheckpointContent) -> Written:
        rank = self._group.rank()
        name = f"__{rank}_0.distcp"
        path = self._partial / name
        try:
            if rank == 0:
                folders.sweep(self._folder, writing=self.step)  # first, since the space may be needed
            objects = [pickled([value]) for value in content.objects.values()]  # in a list, as Megatron expects them
            values = [
                *(shard_slice.data for shard_slice in content.shard_slices),
                *objects,
                rng_state.packed(content.rng_states),
            ]
            return Written(name, *write_items(path, items, values))
        except Exception as e:
            return Written(name, error=f"rank {rank}: {path} cannot be written ({_why(e, self._folder)})")

    def _conclude(self, everything: list[Written], metadata: Metadata, commit: Commit, place: FolderIdentity) -> SaveOutcome:
        """Complete the checkpoint on rank 0, or delete what was written of it."""
        partial = self._partial
        if not place.is_in_place():  # what is there now belongs to another run: it is neither published nor deleted
            return SaveOutcome(error=f"{partial} was removed, moved or replaced while it was written")
        errors = [w.error for w in everything if w.error is not None]
        sums = {w.name: w.sum for w in everything if w.sum is not None}
        if not errors:
            errors += _out_of_sight(partial, sums)
        if not errors:
            try:
                sums = _complete(partial, sums, everything, metadata, commit)
                for aside in folders.publish(self._folder, self.step):
                    _log.warning("%s is of another course of this run and was set aside", aside)
            except Exception as e:
                errors.append(f"rank 0: {partial} cannot be completed ({_why(e, self._folder)})")
        if errors:
            _discard(partial)
            return SaveOutcome(error="; ".join(errors))
        try:
            folders.prune(self._folder, commit.keep_last, commit.keep_every, commit.best)
        except OSError as e:  # the new one is complete all the same
            _log.warning("%s: older checkpoints cannot be deleted (%s)", self._folder, e)
        return SaveOutcome(size=sum(s.size for s in sums.values()))


class SavingThread(threading.Thread):
    """Does one thing after the other. To start a thread for each save would hold up training by a fifth of a small copy."""

    def __init__(self) -> None:
        super().__init__(name="checkpoints", daemon=True)  # a save that hangs does not keep the process
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """What it returns or raises."""
        answer: Future[T] = Future()

        def task() -> None:
            try:
                answer.set_result(question())
            except Exception as e:
                answer.set_exception(e)

        self._tasks.put(task)
        return answer

    def begin(self, save: Save) -> None:
        """Once the former is over."""
        self._tasks.put(save.run)

    def end(self) -> None:
        """Once the save under way is over, if there is one."""
        self._tasks.put(None)

    def run(self) -> None:
        """In the thread, on the device of whoever made it: CUDA would take a new thread to the first one."""
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while (task := self._tasks.get()) is not None:
            task()


def _complete(
    partial: Path, sums: Mapping[str, FileSum], everything: list[Written], metadata: Metadata, commit: Commit
) -> dict[str, FileSum]:
    """All of a checkpoint but the ranks' files, whose sums are given; the manifest comes last. Returns the sums of all."""
    stored = {index: info for w in everything for index, info in w.stored.items()}
    whole = {**sums, **{name: read_sum(partial / name) for name in files_below(partial) if name.startswith("hf/")}}
    whole |= write_metadata(partial, metadata, stored, commit.common)
    whole[RUN] = write(partial / RUN, json.dumps(json.loads(commit.run), indent=1).encode() + b"\n")
    write_manifest(partial, whole)
    return whole


def _discard(partial: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(partial)


def _out_of_sight(partial: Path, sums: Mapping[str, FileSum]) -> list[str]:
    """Files that other ranks wrote and rank 0 cannot see whole."""
    unseen = [name for name, s in sums.items() if not (partial / name).exists() or (partial / name).stat().st_size != s.size]
    if not unseen:
        return []
    return [f"{partial}: rank 0 does not see {', '.join(unseen)} as written; the run's folder must be shared by all ranks"]


def _why(error: Exception, folder: Path) -> str:
    """The error, with the fix or the free space where it is of the disk."""
    if (fault := disk_fault(error, folder)) is not None:
        return fault.partition(": cannot be written: ")[2]
    if not isinstance(error, OSError):
        return repr(error)
    free = shutil.disk_usage(folder).free / 2**20 if folder.exists() else 0.0
    return f"{error.strerror or error}; {free:.0f} MiB free on that disk"
