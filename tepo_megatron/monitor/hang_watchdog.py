"""Hang detection: report which rank hangs and where, instead of a bare collective time-out or silence.

A thread of every rank writes heartbeats into the world's store, with the position of its main thread. Rank 0 reads the
heartbeats of all ranks, and rank 1 reads those of rank 0. If a rank is silent for too long, or stays too long at one position
of a training phase, this is reported once, every rank that can writes the stacks of its threads, and all processes end. Nothing
here is a collective or needs the main thread.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

from tepo_megatron.base.errors import escaped
from tepo_megatron.base.run_lock import FolderIdentity

BEAT_SECONDS = 1.0
# phases in which every rank makes progress; in others a rank may wait for rank 0
TRAINING = ("old_stats", "reference", "update")
JOINING = "joining the servers in"  # + the group's name: a phase with its own deadline, where every rank progresses
VERDICT = "watch/verdict"  # key of the explanation that every rank ends with; the rank that finds a fault first sets it
_COLLECTIVES = os.path.join("torch", "distributed", "")
TRACED = "traced_call"  # function through which `trainer/tracing.py` calls a collective: the caller is the place


@dataclass
class RunPosition:
    """Position of this process in the run; the training loop and the schedule update it.

    `microbatch`: forward steps begun in the current pass: one per microbatch and model chunk. 0: none yet.
    """

    step: int = 0
    phase: str = "start"
    microbatch: int = 0
    backward: int = 0

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Set `phase` for the block. In threads other than the main one this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, self.phase, self.microbatch = self.phase, phase, 0
        try:
            yield
        finally:
            self.phase = before


progress = RunPosition()


class BeatStore(Protocol):
    """The store for the heartbeats of a world: a torch `Store`, or files. Its errors are RuntimeErrors."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key."""

    def set(self, key: str, value: str, /) -> None:
        """Replace the value of a key."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Set a key if it has the expected value. Returns the value that the key has afterwards."""


@dataclass
class _Seen:
    """The last heartbeat of a rank."""

    beat: int = 0
    place: str = "it has not begun"
    phase: str = ""
    left: bool = False  # True if the rank has ended normally
    unheard: int = 0  # beats of the listening rank since this rank's last heartbeat
    unmoved: int = 0  # beats of the listening rank since this rank's position changed


class HangWatchdog:
    """The hang watchdog of one rank; a context manager that runs it.

    Time is counted in beats of the listening rank, so a job that is suspended as a whole and continued has missed none.
    `stuck_seconds`: maximum time at one position of a training phase.
    """

    def __init__(
        self,
        store: BeatStore,
        rank: int,
        world_size: int,
        folder: Path,
        *,
        heartbeat_timeout: float,
        stuck_seconds: float,
        on_hang: Callable[[str], object],
    ) -> None:
        self._store, self._rank, self._world_size, self._folder, self._on_hang = store, rank, world_size, folder, on_hang
        self._heartbeat_timeout, self._stuck_seconds = heartbeat_timeout, stuck_seconds
        listened: Sequence[int] = range(world_size) if rank == 0 else (0,) if rank == 1 else ()
        self._seen = {r: _Seen() for r in listened}
        self._beats = self._unanswered = 0
        self._identity = FolderIdentity(folder)
        self._main, self._over, self._report_lock = threading.main_thread().ident, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=run, name="watch", daemon=True) for run in (self._beat, self._hold_store)]

    def __enter__(self) -> "HangWatchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(self._heartbeat_timeout)
        self._identity.close()
        with contextlib.suppress(RuntimeError):  # the store ended with its owner
            self._say(left=True)

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # of the store, which the other thread reports
            while not self._over.wait(BEAT_SECONDS):
                self._say()
                if self._store.check([VERDICT]):
                    self._leave(self._store.get(VERDICT).decode())
                self._listen(self._seen)
                self._unanswered = 0
                if fault := self._fault():
                    self._leave(self._store.compare_set(VERDICT, "", f"{fault}\n{self._places()}").decode())

    def _hold_store(self) -> None:
        """Detect a store that does not answer. A store frozen with its machine blocks its callers for ever."""
        while not self._over.wait(BEAT_SECONDS):
            self._unanswered += 1
            if self._unanswered * BEAT_SECONDS > self._heartbeat_timeout:
                self._leave(
                    f"the store of this world has not answered for {self._heartbeat_timeout:g} s (parallel.heartbeat_timeout): "
                    f"rank 0, or whoever started it, is frozen, or its machine is gone; rank {self._rank} is at "
                    f"{self._place()}",
                    cut_off=True,
                )

    def _place(self) -> str:
        return place_of(sys._current_frames().get(self._main or 0))

    def _say(self, left: bool = False) -> None:
        self._beats += 1
        self._store.set(_key(self._rank), json.dumps([self._beats, self._place(), progress.phase, left]))

    def _listen(self, seen: Mapping[int, _Seen]) -> None:
        for rank, of in seen.items():
            of.unheard, of.unmoved = of.unheard + 1, of.unmoved + 1
            if not self._store.check([_key(rank)]):
                continue
            beat, place, phase, left = json.loads(self._store.get(_key(rank)))
            if beat != of.beat:
                of.unheard = 0
            if place != of.place:
                of.unmoved = 0
            of.beat, of.place, of.phase, of.left = beat, place, phase, left

    def _fault(self) -> str | None:
        running = {rank: of for rank, of in self._seen.items() if not of.left}
        for rank, of in running.items():
            if of.unheard * BEAT_SECONDS >= self._heartbeat_timeout:
                return (
                    f"rank {rank} has not been heard of for {self._heartbeat_timeout:g} s (parallel.heartbeat_timeout): its "
                    f"process is frozen, or its machine is gone; last at {of.place}"
                )
        for rank, of in running.items() if self._rank == 0 else ():
            if of.phase.startswith((*TRAINING, JOINING)) and of.unmoved * BEAT_SECONDS >= self._stuck_seconds:
                return f"rank {rank} has been in one place for {self._stuck_seconds:g} s (parallel.timeout_seconds): {of.place}"
        return None

    def _places(self) -> str:
        seen = {rank: _Seen() for rank in range(self._world_size)}
        self._listen(seen)
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, of in seen.items():
            ranks["it has left" if of.left else of.place].append(rank)
        lines = [f"  {_ranges(of)}: {place}" for place, of in ranks.items()]
        return "\n".join([*lines, f"the stacks of those that could write them: {self._folder / 'stacks'}"])

    def _leave(self, explanation: str, cut_off: bool = False) -> None:
        with self._report_lock:
            if self._identity.is_in_place():  # else the folder now belongs to another run
                self._write(explanation, cut_off)
            time.sleep(2 * BEAT_SECONDS)  # so that the others read the verdict and write their stacks
            self._on_hang(explanation)

    def _write(self, explanation: str, cut_off: bool) -> None:
        with contextlib.suppress(OSError):
            (self._folder / "stacks").mkdir(parents=True, exist_ok=True)
            with (self._folder / "stacks" / f"rank-{self._rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file)
            with (self._folder / "hang.txt").open("x" if cut_off else "w") as file:
                file.write(explanation + "\n")


def _key(rank: int) -> str:
    return f"watch/{rank}"


def place_of(frame: FrameType | None) -> str:
    """Return the position of a thread as text.

    It holds the step, the phase, the microbatch, the waiting collective if any, and the source line in this package or
    Megatron-Core.
    """
    collective, line = "", ""
    while frame is not None and not line:
        path = frame.f_code.co_filename
        if frame.f_code.co_name == TRACED:
            frame = frame.f_back
            continue
        if _COLLECTIVES in path and frame.f_code.co_name != "wrapper":  # skip the wrapper of its logger
            collective = frame.f_code.co_name  # the outermost frame is the function that was called
        for package in ("tepo_megatron", "megatron"):
            if f"{os.sep}{package}{os.sep}" in path:
                inside = path.rpartition(f"{os.sep}{package}{os.sep}")[2]
                line = f"{package}/{inside}:{frame.f_lineno}, {frame.f_code.co_name}"
                break
        frame = frame.f_back
    where = f"step {progress.step}, {progress.phase}" + (f", microbatch {progress.microbatch}" if progress.microbatch else "")
    return where + (f", in {collective}" if collective else "") + (f" ({line})" if line else "")


def _ranges(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 3" or "ranks 0, 3-5, 9"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


def abort(explanation: str) -> NoReturn:
    """Print the explanation on stderr and end this process with status 1."""
    print(f"tepo: error: {escaped(explanation)}", file=sys.stderr, flush=True)
    os._exit(1)
