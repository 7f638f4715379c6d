"""A pool of grading workers: child processes that may hang, grow or crash without harm to the run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Literal, cast

from tepo_megatron.errors import RewardError

PoolStatus = Literal["equal", "wrong", "unparsed", "timeout", "died", "bad_gold"]

_WORKER = Path(__file__).with_name("worker.py")
_START_SECONDS = 120.0  # generous: under a second on an idle machine, but the machine may be loading a model
_START_ATTEMPTS = 3  # the kernel may have killed the first for want of memory
_STDERR_TAIL_BYTES = 2000


class _Worker:
    """One child process and the one pair it is grading.

    task: the index of that pair, None where there is none; deadline: on the monotonic clock, when the start or that
    pair is overdue.
    """

    def __init__(self, soft_seconds: float, memory_mib: int) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        self._process = subprocess.Popen(
            # -P: the folder of worker.py holds a math.py, which must not hide the standard one
            [sys.executable, "-P", str(_WORKER), str(soft_seconds), str(memory_mib), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONHASHSEED": "0"},  # SymPy's order of terms, hence its verdicts, repeat
            start_new_session=True,  # the terminal's Ctrl-C is for the run, which then closes the pool
        )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.replies = self._stdout.fileno()  # readable when a reply or the end has come
        self._received = b""
        self.ready = False
        self.task: int | None = None
        self.deadline = time.monotonic() + _START_SECONDS

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def idle(self) -> bool:
        return self.ready and self.task is None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, task: int, pair: tuple[str, str], hard_seconds: float) -> None:
        """Hand over a pair; its time runs from here. Raises BrokenPipeError if the process is gone."""
        self.task, self.deadline = task, time.monotonic() + hard_seconds
        self._stdin.write(json.dumps(pair).encode() + b"\n")
        self._stdin.flush()

    def receive(self) -> str | None:
        """The next reply, None while it is incomplete. Raises EOFError if the process is gone."""
        chunk = os.read(self.replies, 4096)
        if not chunk:
            raise EOFError
        self._received += chunk
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        return json.loads(line)

    def stderr_tail(self) -> str:
        """The last lines that the process wrote before it was ready."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _STDERR_TAIL_BYTES))
        return self._stderr.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """End the process and give back its pipes."""
        self._process.kill()
        self._process.wait()
        for file in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):  # a request that the process never read
                file.close()


class GradingPool:
    """Grades (gold, answer) pairs in `workers` processes, which start at once but are waited for only by `grade`.

    soft_seconds: wall time that a worker gives itself for a pair; hard_seconds: from dispatch, then it is killed and
    replaced; memory_mib: its address space. Not for several threads at once. A worker lives no longer than the thread
    that started it (the one that builds the pool; later the one that grades).
    """

    def __init__(self, workers: int, soft_seconds: float, hard_seconds: float, memory_mib: int) -> None:
        self._soft_seconds, self._hard_seconds, self._memory_mib = soft_seconds, hard_seconds, memory_mib
        self._workers = [self._start() for _ in range(workers)]
        self._failed_starts = 0  # in a row
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def grade(self, pairs: Sequence[tuple[str, str]]) -> list[PoolStatus]:
        """One status for each (gold, answer), in order, whatever the answers do to their workers.

        Takes at most about len(pairs) / workers * hard_seconds. Raises RewardError if a worker cannot start and
        ValueError after `close`.
        """
        if self._closed:
            raise ValueError("the grading pool is closed")
        todo = deque(enumerate(pairs))
        verdicts: dict[int, PoolStatus] = {}
        try:
            while len(verdicts) < len(pairs):
                self._dispatch(todo, verdicts)
                self._collect(verdicts)
        except BaseException:
            # a reply still under way would be taken for one of the next batch
            self.close()
            raise
        return [verdicts[task] for task in range(len(pairs))]

    def close(self) -> None:
        """Kill the workers. A second call does nothing."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _start(self) -> _Worker:
        try:
            return _Worker(self._soft_seconds, self._memory_mib)
        except OSError as e:
            raise RewardError(f"cannot start a grading worker ({e}); lower reward.workers") from e

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = self._start()

    def _dispatch(self, todo: deque[tuple[int, tuple[str, str]]], verdicts: dict[int, PoolStatus]) -> None:
        """Give each idle worker the next pair."""
        for worker in [w for w in self._workers if w.idle]:
            if not todo:
                return
            if not worker.is_alive():  # died between two batches: that costs no pair
                self._replace(worker)
                continue
            task, pair = todo.popleft()
            try:
                worker.send(task, pair, self._hard_seconds)
            except BrokenPipeError:
                self._settle(worker, "died", verdicts)

    def _collect(self, verdicts: dict[int, PoolStatus]) -> None:
        """Wait until a worker replies, dies, or is overdue."""
        waiting = [w for w in self._workers if not w.idle]
        if not waiting:
            return
        patience = min(w.deadline for w in waiting) - time.monotonic()
        readable = wait([w.replies for w in waiting], timeout=max(0.0, patience))
        for worker in waiting:
            if worker.replies in readable:
                self._read(worker, verdicts)
            elif time.monotonic() >= worker.deadline:
                self._settle(worker, "timeout", verdicts)

    def _read(self, worker: _Worker, verdicts: dict[int, PoolStatus]) -> None:
        try:
            reply = worker.receive()
        except EOFError:
            self._settle(worker, "died", verdicts)
            return
        if reply == "ready":
            worker.ready = True
            self._failed_starts = 0
        elif reply is not None:
            assert worker.task is not None
            verdicts[worker.task], worker.task = cast(PoolStatus, reply), None

    def _settle(self, worker: _Worker, status: Literal["timeout", "died"], verdicts: dict[int, PoolStatus]) -> None:
        """Book the pair, if any, of a worker that will not reply, and replace the worker.

        Raises RewardError where starting it again is in vain.
        """
        if worker.task is not None:
            verdicts[worker.task] = status
        elif status == "timeout" or self._failed_starts == _START_ATTEMPTS - 1:
            fate = "ended" if status == "died" else f"was not ready after {_START_SECONDS:.0f} s"
            raise RewardError(
                f"a grading worker {fate} before its first answer; check that math-verify is installed for "
                f"{sys.executable} and that reward.memory_mib={self._memory_mib} is enough. Its last words:\n"
                f"{worker.stderr_tail() or '(none)'}"
            )
        else:
            self._failed_starts += 1
        self._replace(worker)
