"""One save under way: a thread on each rank that writes what was copied, until the checkpoint is complete or has failed.

Threads, not processes: a fork would carry along the locks of gloo's and CUDA's threads, a spawned process would import the
program anew, and either could outlive a killed rank. Writing, summing and fsync leave the interpreter to the training thread.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint.agreement import from_main, to_main
from tepo_megatron.checkpoint.files import FileSum, files_below, read_sum, write, write_manifest
from tepo_megatron.checkpoint.tensors import Stored, write_items, write_metadata

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
class Commit:
    """What rank 0 adds to the ranks' files, and which older checkpoints stay."""

    metadata: Metadata
    common: Mapping[str, Any]
    run: bytes
    keep_last: int
    keep_every: int | None


@dataclass(frozen=True)
class Written:
    """One rank's file, or why there is none."""

    name: str
    sum: FileSum | None = None
    stored: Stored = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How a save ended, as one rank knows it. error: None when the checkpoint is complete; broken: ranks lost each other."""

    size: int = 0
    error: str | None = None
    broken: bool = False


class Save(threading.Thread):
    """Writes one checkpoint with its fellows on the other ranks, over a group that nobody else uses."""

    def __init__(
        self,
        folder: Path,
        step: int,
        items: Sequence[WriteItem],
        values: Sequence[Tensor | bytes],
        commit: Commit | None,
        group: dist.ProcessGroup,
        started: float,
    ) -> None:
        """commit: on rank 0 only; started: `time.perf_counter()` when the save was asked for."""
        super().__init__(name=f"checkpoint-{step}", daemon=True)
        self.step = step
        self.started, self.begun, self.ended = started, time.perf_counter(), 0.0  # begun: once the former save was over
        self.outcome: Outcome | None = None  # None until the thread has ended
        self._folder, self._items, self._values, self._commit, self._group = folder, items, values, commit, group

    def run(self) -> None:
        """Nothing is raised: see `outcome`."""
        try:
            outcome = self._together()
        except Exception as e:  # whatever gloo raises when a rank is gone or late
            outcome = Outcome(error=f"rank {self._group.rank()}: the ranks lost each other while writing ({e})", broken=True)
        self._values = ()  # the copies may be overwritten by the next save
        self.ended = time.perf_counter()
        self.outcome = outcome

    def _together(self) -> Outcome:
        everything = to_main(self._write(), self._group)
        outcome = Outcome()
        if self._commit is not None:
            outcome = self._conclude(everything, self._commit)
        return from_main(outcome, self._group)

    def _write(self) -> Written:
        rank = self._group.rank()
        name = f"__{rank}_0.distcp"
        path = folders.partial(self._folder, self.step) / name
        try:
            if rank == 0:
                folders.sweep(self._folder, writing=self.step)  # first, since the space may be needed
            return Written(name, *write_items(path, self._items, self._values))
        except Exception as e:
            return Written(name, error=f"rank {rank}: {path} cannot be written ({_why(e, self._folder)})")

    def _conclude(self, everything: list[Written], commit: Commit) -> Outcome:
        """On rank 0: the checkpoint is complete, or what was written of it goes."""
        partial = folders.partial(self._folder, self.step)
        errors = [w.error for w in everything if w.error is not None]
        sums = {w.name: w.sum for w in everything if w.sum is not None}
        if not errors:
            errors += _out_of_sight(partial, sums)
        if not errors:
            try:
                sums = _complete(partial, sums, everything, commit)
                for aside in folders.publish(self._folder, self.step):
                    _log.warning("%s is of another course of this run and was set aside", aside)
            except Exception as e:
                errors.append(f"rank 0: {partial} cannot be completed ({_why(e, self._folder)})")
        if errors:
            with contextlib.suppress(OSError):
                shutil.rmtree(partial)
            return Outcome(error="; ".join(errors))
        try:
            folders.prune(self._folder, commit.keep_last, commit.keep_every)
        except OSError as e:  # the new one is complete all the same
            _log.warning("%s: older checkpoints cannot be deleted (%s)", self._folder, e)
        return Outcome(size=sum(s.size for s in sums.values()))


def _complete(partial: Path, sums: Mapping[str, FileSum], everything: list[Written], commit: Commit) -> dict[str, FileSum]:
    """All of a checkpoint but the ranks' files, whose sums are given; the manifest comes last. Returns the sums of all."""
    stored = {index: info for w in everything for index, info in w.stored.items()}
    whole = {**sums, **{name: read_sum(partial / name) for name in files_below(partial) if name.startswith("hf/")}}
    whole |= write_metadata(partial, commit.metadata, stored, commit.common)
    whole[RUN] = write(partial / RUN, commit.run)
    write_manifest(partial, whole)
    return whole


def _out_of_sight(partial: Path, sums: Mapping[str, FileSum]) -> list[str]:
    """Files that other ranks wrote and rank 0 cannot see whole."""
    unseen = [name for name, s in sums.items() if not (partial / name).exists() or (partial / name).stat().st_size != s.size]
    if not unseen:
        return []
    return [f"{partial}: rank 0 does not see {', '.join(unseen)} as written; the run's folder must be shared by all ranks"]


def _why(error: Exception, folder: Path) -> str:
    """The error, with the free space where it is of the disk."""
    if not isinstance(error, OSError):
        return repr(error)
    free = shutil.disk_usage(folder).free / 2**20 if folder.exists() else 0.0
    return f"{error.strerror or error}; {free:.0f} MiB free on that disk"
