"""One grading worker from its parent's side: the child process, its pipes, and its current request."""

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

from tepo_megatron.utils.processes import has_ended

WORKER = Path(__file__).parents[1] / "grading" / "worker.py"
START_SECONDS = 120.0  # a start takes under a second on an idle machine, but the machine may be loading a model
_END_SECONDS = 0.2  # a process closes its pipes at most this long before it has ended
_STDERR_TAIL_BYTES = 2000
_REPLY_BYTES = 65536  # more than any valid reply has


@dataclass(frozen=True)
class WorkerOutcome:
    """The result of one request.

    Attributes:
        status: Status of the grader, or `timeout` or `died`.
        value: Value in units of the reward; 0 unless graded.
        detail: Error text of a grader whose status is `failed`.
    """

    status: str
    value: float = 0.0
    detail: str = ""


class WorkerBroken(Exception):
    """The process is gone, or sent an invalid reply."""


class GradingWorker:
    """One child process and its current request.

    Attributes:
        task: Index of the request, None if there is none.
        deadline: Time on the monotonic clock at which the start, or the request, is overdue.
        ready: The worker has reported that it can grade.
        requests: File descriptor to which requests are written.
        replies: File descriptor from which replies are read.
    """

    def __init__(self, command: Sequence[str], soft_seconds: float, memory_mib: int) -> None:
        """Start the process without waiting for it.

        Args:
            command: Grader of `grading/worker.py` and its arguments.
            soft_seconds: Processor time that the worker gives itself per request.
            memory_mib: Address space of the worker, in MiB.
        """
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        self._process = subprocess.Popen(
            # -P: the folder of worker.py must not hide modules of the standard library
            [sys.executable, "-P", str(WORKER), str(soft_seconds), str(memory_mib), str(os.getpid()), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            env={**os.environ, "PYTHONHASHSEED": "0"},  # makes SymPy's order of terms, hence its verdicts, reproducible
            start_new_session=True,  # the terminal's Ctrl-C must reach only the run, which then closes the pool
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
        """Process id."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """True if the worker is ready and has no request."""
        return self.ready and self.task is None

    @property
    def sending(self) -> bool:
        """True while a part of the request has still to be written."""
        return bool(self._unsent)

    def is_alive(self) -> bool:
        """Return whether the process runs. An ended process keeps its pid until `kill`."""
        return not has_ended(self.pid)

    def exit_description(self) -> str:
        """Return how the process ended, for a message: by a signal, with a status, or not at all (it sent an invalid reply)."""
        with contextlib.suppress(ChildProcessError):
            deadline = time.monotonic() + _END_SECONDS  # pipes close shortly before the process has ended
            while time.monotonic() < deadline:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # WNOWAIT: `kill` reaps it
                if ended is not None and ended.si_code == os.CLD_EXITED:
                    return f"ended with status {ended.si_status}"
                if ended is not None:
                    return f"was ended by {signal.Signals(ended.si_status).name}"
                time.sleep(_END_SECONDS / 20)
        return "answered with something that is no answer"

    def send(self, task: int, texts: Sequence[str], hard_seconds: float) -> None:
        """Start to send a request; its deadline counts from now. Raises WorkerBroken.

        Args:
            task: Index of the request.
            texts: Texts of the request, the grader's arguments.
            hard_seconds: Wall time until the request is overdue.
        """
        self.task, self.deadline = task, time.monotonic() + hard_seconds
        self._serial += 1
        self._unsent = json.dumps([self._serial, *texts]).encode() + b"\n"
        self.continue_send()

    def continue_send(self) -> None:
        """Write as much of the request as the pipe takes. Raises WorkerBroken."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.requests, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            raise WorkerBroken from None

    def receive(self) -> WorkerOutcome | None:
        """Read what the pipe holds.

        Returns:
            The outcome, or None while it is incomplete or the worker only said `ready`.

        Raises:
            WorkerBroken: The worker ended, or sent an invalid reply.
        """
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

    def _outcome(self, reply: Any) -> WorkerOutcome:
        """Return the outcome in a reply. Raises WorkerBroken unless it answers the current request."""
        match reply:
            case [int(serial), str(status), float(value) | int(value), str(detail)] if (
                self.task is not None and serial == self._serial and math.isfinite(value)
            ):
                return WorkerOutcome(status, float(value), detail)
        raise WorkerBroken

    def stderr_tail(self) -> str:
        """Return the end of what the process wrote to stderr before it was ready."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _STDERR_TAIL_BYTES))
        return self._stderr.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill the process group, which includes processes that a user's function started, and close the pipes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):  # a request that the process never read
                file.close()
