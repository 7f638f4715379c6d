"""One grading worker from its parent's side: the child process, its pipes, and its current request."""

import asyncio
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tepo_megatron.base.processes import has_ended, reap
from tepo_megatron.base.progress import LOOK_SECONDS, START_SECONDS, STUCK_SECONDS, StartProgress

WORKER = Path(__file__).parent / "grading" / "worker.py"
_END_SECONDS = 0.2  # limit since a worker's pipes closed: exiting takes milliseconds; then the message says less
_STDERR_TAIL_BYTES = 2000
_CHUNK_BYTES = 65536
REPLY_BYTES = 65536  # more than any valid reply without a decoded text has

Field = str | bytes  # of a request: text, or token ids (int32), which the worker decodes


@dataclass(frozen=True)
class WorkerOutcome:
    """The result of one request.

    Attributes:
        value: Value in units of the reward; 0 unless graded.
        detail: Text that belongs to the status: the error of `failed`, the answer of `open`.
    """

    status: str
    value: float = 0.0
    detail: str = ""
    cpu_seconds: float = field(default=0.0, compare=False)


class WorkerBroken(Exception):
    """The process is gone, or sent an invalid reply."""


class GradingWorker:
    """One child process, which replies to requests in their order. All coroutines must run in one event loop."""

    def __init__(self, command: Sequence[str], soft_seconds: float, memory_mib: int, tokenizer: str, reply_bytes: int) -> None:
        """Start the process without waiting for it."""
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        self._process = subprocess.Popen(
            # -P: the folder of worker.py must not hide modules of the standard library
            [sys.executable, "-P", str(WORKER), str(soft_seconds), str(memory_mib), str(os.getpid()), tokenizer, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            env={**os.environ, "PYTHONHASHSEED": "0"},  # makes SymPy's order of terms, hence its verdicts, reproducible
            start_new_session=True,  # the terminal's Ctrl-C must reach only the run, which then closes the pool
        )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for file in (self._stdin, self._stdout):  # a process that neither reads nor writes must not block the parent
            os.set_blocking(file.fileno(), False)
        self._unsent, self._received, self._reply_bytes = memoryview(b""), b"", reply_bytes
        self._sent = self._answered = 0  # requests

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def is_usable(self) -> bool:
        """Return whether the process runs and has said nothing since its last reply. It keeps its pid until `kill`."""
        return not self._received and not has_ended(self.pid)

    async def exit_description(self) -> str:
        """Return how the process ended, for a message: by a signal, with a status, or not at all (it sent an invalid reply)."""
        with contextlib.suppress(ChildProcessError):
            deadline = time.monotonic() + _END_SECONDS  # pipes close shortly before the process has ended
            while time.monotonic() < deadline:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # WNOWAIT: `kill` reaps it
                if ended is not None and ended.si_code == os.CLD_EXITED:
                    return f"ended with status {ended.si_status}"
                if ended is not None:
                    return f"was ended by {signal.Signals(ended.si_status).name}"
                await asyncio.sleep(_END_SECONDS / 20)
        return "answered with something that is no answer"

    async def wait_ready(self) -> None:
        """Wait until the process can grade or its start is stuck. Raises WorkerBroken, or TimeoutError that says why."""
        progress, deadline = StartProgress(self.pid), time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                if await self._reply(time.monotonic() + LOOK_SECONDS) != "ready":
                    raise WorkerBroken
                return
            if (idle := progress.idle_seconds()) > STUCK_SECONDS:
                raise TimeoutError(f"used neither CPU time nor a disk for {idle:.0f} s")
            if time.monotonic() > deadline:
                raise TimeoutError(f"was not ready after {START_SECONDS:g} s")

    def send(self, requests: Sequence[Sequence[Field]]) -> None:
        """Send requests, or as much of them as the pipe takes: `receive` sends the rest. Raises WorkerBroken."""
        parts: list[bytes] = []
        for fields in requests:
            self._sent += 1
            head = [self._sent, *(f if isinstance(f, str) else len(f) for f in fields)]
            parts += [json.dumps(head).encode(), b"\n", *(f for f in fields if isinstance(f, bytes))]
        self._unsent = memoryview(b"".join((self._unsent, *parts)))
        self._write()

    async def receive(self, deadline: float) -> WorkerOutcome:
        """Return the outcome of the next request. If the call is cancelled, nothing is lost."""
        match await self._reply(deadline):
            case [int(serial), str(status), float(value) | int(value), str(detail), float(seconds)] if (
                serial == self._answered + 1 <= self._sent and math.isfinite(value) and 0 <= seconds < math.inf
            ):
                self._answered += 1
                return WorkerOutcome(status, float(value), detail, seconds)
        raise WorkerBroken

    async def _reply(self, deadline: float) -> Any:
        while b"\n" not in self._received:
            if len(self._received) > self._reply_bytes:
                raise WorkerBroken
            await self._transfer(deadline)
        line, _, self._received = self._received.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise WorkerBroken from None

    async def _transfer(self, deadline: float) -> None:
        """Wait until the process has written something or reads on, and move these bytes. Raises WorkerBroken, TimeoutError."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._stdout, ready.set)
        if self._unsent:
            loop.add_writer(self._stdin, ready.set)
        try:
            async with asyncio.timeout_at(deadline):
                await ready.wait()
        except TimeoutError:
            if self._read():
                return
            raise
        finally:
            loop.remove_reader(self._stdout)
            loop.remove_writer(self._stdin)
        self._write()
        self._read()

    def _read(self) -> bool:
        try:
            chunk = os.read(self._stdout.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            raise WorkerBroken
        self._received += chunk
        return True

    def _write(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            raise WorkerBroken from None

    def stderr_tail(self) -> str:
        """Return the end of what the process wrote to stderr before it was ready."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _STDERR_TAIL_BYTES))
        return self._stderr.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill the process group, which includes processes that a user's function started, and close the pipes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        reap(self._process)
        for file in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):  # a request that the process never read
                file.close()
