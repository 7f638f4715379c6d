"""One grading worker as its parent sees it: a child process, its pipes, and the request that it is at."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tepo_megatron.processes import has_ended

WORKER = Path(__file__).parents[1] / "grading" / "worker.py"
START_SECONDS = 120.0  # generous: under a second on an idle machine, but the machine may be loading a model
_END_SECONDS = 0.2  # between the end of its output and its own
_STDERR_TAIL_BYTES = 2000
_REPLY_BYTES = 65536  # more than any reply has


@dataclass(frozen=True)
class Outcome:
    """What became of a request. status: as the grader has it, or `timeout` or `died`; detail: what a failed one says."""

    status: str
    value: float = 0.0
    detail: str = ""


class WorkerBroken(Exception):
    """The process is gone, or says what no worker would."""


class Worker:
    """One child process and the one request it is at.

    command: the grader and its arguments; task: the index of the request, None where there is none; deadline: on the monotonic
    clock, when the start or that request is overdue.
    """

    def __init__(self, command: Sequence[str], soft_seconds: float, memory_mib: int) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        self._process = subprocess.Popen(
            # -P: the folder of worker.py must not hide modules of the standard library
            [sys.executable, "-P", str(WORKER), str(soft_seconds), str(memory_mib), str(os.getpid()), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            env={**os.environ, "PYTHONHASHSEED": "0"},  # SymPy's order of terms, hence its verdicts, repeat
            start_new_session=True,  # the terminal's Ctrl-C is for the run, which then closes the pool
        )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.requests, self.replies = self._stdin.fileno(), self._stdout.fileno()
        os.set_blocking(self.requests, False)  # a long request to a process that does not read must not block the parent
        self._unsent, self._received, self._serial = b"", b"", 0
        self.ready = False
        self.task: int | None = None
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def idle(self) -> bool:
        return self.ready and self.task is None

    @property
    def sending(self) -> bool:
        """Whether a part of the request has still to be written."""
        return bool(self._unsent)

    def is_alive(self) -> bool:
        """Whether it runs; one that has ended keeps its pid until `kill`."""
        return not has_ended(self.pid)

    def fate(self) -> str:
        """Return how it ended, for a message: by a signal, with a status, or not at all."""
        with contextlib.suppress(ChildProcessError):
            deadline = time.monotonic() + _END_SECONDS  # its pipes are closed before it has ended
            while time.monotonic() < deadline:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # `kill` takes the status
                if ended is not None and ended.si_code == os.CLD_EXITED:
                    return f"ended with status {ended.si_status}"
                if ended is not None:
                    return f"was ended by {signal.Signals(ended.si_status).name}"
                time.sleep(_END_SECONDS / 20)
        return "answered with something that is no answer"

    def send(self, task: int, texts: Sequence[str], hard_seconds: float) -> None:
        """Hand over a request; its time runs from here. Raises WorkerBroken."""
        self.task, self.deadline = task, time.monotonic() + hard_seconds
        self._serial += 1
        self._unsent = json.dumps([self._serial, *texts]).encode() + b"\n"
        self.send_on()

    def send_on(self) -> None:
        """Write what the pipe takes of the request. Raises WorkerBroken."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.requests, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            raise WorkerBroken from None

    def receive(self) -> Outcome | None:
        """What there is to read: an outcome, or None while it is incomplete or only says `ready`. Raises WorkerBroken."""
        chunk = os.read(self.replies, _REPLY_BYTES)
        self._received += chunk
        line, newline, rest = self._received.partition(b"\n")
        if not chunk or rest or len(line) > _REPLY_BYTES:
            raise WorkerBroken
        if not newline:
            return None
        self._received = b""
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            raise WorkerBroken from None
        if not self.ready and reply == "ready":
            self.ready = True
            return None
        return self._outcome(reply)

    def _outcome(self, reply: Any) -> Outcome:
        """Raises WorkerBroken unless it answers the request that is under way."""
        match reply:
            case [int(serial), str(status), float(value) | int(value), str(detail)] if (
                self.task is not None and serial == self._serial and math.isfinite(value)
            ):
                return Outcome(status, float(value), detail)
        raise WorkerBroken

    def last_words(self) -> str:
        """What the process wrote to stderr before it was ready: the end of it."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _STDERR_TAIL_BYTES))
        return self._stderr.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """End the process, with those that a function of the user started in it, and give back its pipes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):  # a request that the process never read
                file.close()
