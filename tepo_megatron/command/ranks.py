"""Run the ranks and the rollout service of a run on this machine as child processes.

The ranks are started, watched and ended, and it is found out why they failed. The service lives on while ranks are restarted.
Nothing has an address. For each rank 0 the launcher makes a socket pair: rank 0 inherits one end, and the service receives the
other over a socket pair that it inherited itself. The kernel ends the service with the launcher (PR_SET_PDEATHSIG).
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tepo_megatron.base.memory_kills import MemoryKills
from tepo_megatron.base.processes import die_with_parent, handlers_restored, reap
from tepo_megatron.service.messages import CONNECTION, CONTROL, ended
from tepo_megatron.trainer.worker import ERROR_FILE

SERVICE = ("-P", "-m", "tepo_megatron.service.service")
# Limit since SIGTERM to the service: it stops its servers, which their guards end in any case; then SIGKILL
SERVICE_GRACE_SECONDS = 10.0


class ServiceProcess(contextlib.AbstractContextManager["ServiceProcess"]):
    """Starts the service when a rank 0 needs one, and ends it on exit."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._words, self._environment = words, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def connect(self) -> tuple[socket.socket, int]:
        """Return rank 0's end of a new connection, and the service's pid. A service that has ended is replaced."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        assert self._control is not None, "it is made with the process"
        of_rank, of_service = socket.socketpair()
        with of_service, contextlib.suppress(OSError):  # the service has just ended, which rank 0 notices
            socket.send_fds(self._control, [b"\0"], [of_service.fileno()])
        return of_rank, self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        if self._control is not None:
            self._control.close()
        self._control, of_service = socket.socketpair()
        with of_service:
            return subprocess.Popen(
                [sys.executable, *self._words],
                env={**os.environ, **self._environment, CONTROL: str(of_service.fileno())},
                pass_fds=[of_service.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal reaches only the launcher
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    def explained(self, message: str, kills: MemoryKills) -> str:
        """Return a rank's message. Where it is that the service has ended, it says how, which its parent alone knows."""
        if self._process is None or (text := ended(self._process.pid)) not in message:
            return message
        status = reap(self._process)
        if status is None or status >= 0:
            return message.replace(text, f"{text} with status {status}; its last lines are above")
        why = f": {kills.explain()}" if status == -signal.SIGKILL else ""
        return message.replace(text, f"{text.removesuffix('has ended')}was ended by {signal.Signals(-status).name}{why}")

    def __exit__(self, *exc_info: object) -> None:
        if self._process is None or self._control is None:
            return
        self._process.terminate()
        try:
            self._process.wait(SERVICE_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            reap(self._process)
        self._control.close()


_POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0  # limit since SIGTERM to the ranks: they end at once, files are written atomically; then SIGKILL
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WARNINGS = (signal.SIGUSR1, signal.SIGTERM)  # the first SIGTERM, and every SIGUSR1
_KILLED = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)


@dataclass(frozen=True)
class RankFailure:
    """The end of one rank."""

    pid: int
    status: int  # its exit status; negative: the signal that ended it
    message: Mapping[str, Any] | None  # the message that it left; None if it left none
    # Whether it still ran when the launcher ended all ranks, so that its signal was the launcher's own
    ended_by_us: bool = False


class RankProcesses(contextlib.AbstractContextManager["RankProcesses"]):
    """A context manager that starts ranks and waits for them; no rank is left when it exits."""

    def __init__(
        self,
        argv: Sequence[str],
        ranks: range,
        size: int,
        folder: Path,
        shared: Mapping[str, str],
        inherit: Sequence[int],
    ) -> None:
        """Store what to start: `ranks` of `size` ranks; nothing is started yet."""
        self._argv, self._ranks, self._size, self._folder = argv, ranks, size, folder
        self._shared, self._inherit = shared, inherit
        self._started: list[subprocess.Popen[bytes]] = []
        self._running: set[int] = set()  # ranks that still ran when the launcher ended all of them

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def start(self, service: ServiceProcess | None = None) -> None:
        """Start all ranks. Rank 0 gets a connection to the service."""
        for rank in self._ranks:
            own = {
                "RANK": str(rank), "LOCAL_RANK": str(rank - self._ranks.start),
                "WORLD_SIZE": str(self._size), "LOCAL_WORLD_SIZE": str(len(self._ranks)),
                ERROR_FILE: str(self._error_file(rank)),
            }  # fmt: skip
            inherited = list(self._inherit)
            with contextlib.ExitStack() as stack:
                if rank == 0 and service is not None:
                    connection, pid = service.connect()
                    inherited.append(stack.enter_context(connection).fileno())
                    own[CONNECTION] = f"{connection.fileno()},{pid}"
                # each in its own session: Ctrl-C in a terminal reaches only the launcher, which then ends the ranks in order
                self._started.append(
                    subprocess.Popen(
                        [sys.executable, *self._argv], env={**os.environ, **self._shared, **own},
                        start_new_session=True, pass_fds=inherited,
                    )
                )  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """Process IDs of the ranks that were started, in their order."""
        return [process.pid for process in self._started]

    def wait(self) -> dict[int, RankFailure]:
        """Return {} once all ranks have ended without error. After a first failure, end the others and return all failures."""
        while True:
            statuses = [process.poll() for process in self._started]
            if any(statuses):
                self._running = {r for r, status in zip(self._ranks, statuses, strict=True) if status is None}
                self._end()
                return self._failures()
            if all(status == 0 for status in statuses):
                return {}
            time.sleep(_POLL_SECONDS)

    def _end(self) -> None:
        """Send SIGTERM to the ranks and the processes of their sessions, then SIGKILL to those that are left."""
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(process.poll() is None for process in self._started) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
        self._send(signal.SIGKILL)
        for process in self._started:
            reap(process)

    def _send(self, number: signal.Signals) -> None:
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _failures(self) -> dict[int, RankFailure]:
        failures = {}
        for rank, process in zip(self._ranks, self._started, strict=True):
            if process.returncode:
                message = _read(self._error_file(rank))
                failures[rank] = RankFailure(process.pid, process.returncode, message, rank in self._running)
        return failures

    def _error_file(self, rank: int) -> Path:
        return self._folder / f"error-{rank}.json"


def was_killed(failure: RankFailure) -> bool:
    """Return whether a rank was killed from outside, and not by the launcher."""
    return failure.message is None and not failure.ended_by_us and -failure.status in _KILLED


def cause_of(failures: Mapping[int, RankFailure], kills: MemoryKills) -> int:
    """Return the rank whose failure caused the others.

    The order is: a rank that the kernel killed for memory; a TepoError; a rank that was killed from outside; the earliest
    traceback, since ranks whose peers vanished fail too, in their collectives. Mere consequences come last: aborts and the
    launcher's own signals.
    """
    for_memory = kills.seen()

    def order(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        if failure.message is not None:
            return (1 if failure.message["expected"] else 3), float(failure.message["time"])
        if not was_killed(failure):
            return 4, 0.0
        return (0 if for_memory and -failure.status == signal.SIGKILL else 2), 0.0

    return min(failures, key=order)


def first_failure(failures: Mapping[int, RankFailure], kills: MemoryKills) -> str:
    """Return the message of the failure that caused the others (`cause_of`)."""
    rank = cause_of(failures, kills)
    failure = failures[rank]
    if failure.message is not None:
        text = failure.message["message"]  # where every rank raises an error of rank 0, it is rank 0's
        first = min(r for r, other in failures.items() if other.message is not None and other.message["message"] == text)
        return f"rank {first}: {text}"
    if failure.status < 0:
        name = signal.Signals(-failure.status).name
        why = f": {kills.explain()}" if -failure.status == signal.SIGKILL and not failure.ended_by_us else ""
        return f"rank {rank} (pid {failure.pid}) was ended by {name}{why}"
    return f"rank {rank} (pid {failure.pid}) exited with status {failure.status} without a message"


@contextlib.contextmanager
def interrupted_by_signals(warn: Callable[[str], None] | None = None) -> Iterator[None]:
    """Raise KeyboardInterrupt("signal NAME") on the signals that end a command. The old handlers are restored afterwards.

    Args:
        warn: Called with the signal's name on SIGUSR1 and on the first SIGTERM, which then raise nothing. None: SIGTERM raises,
            and SIGUSR1 keeps its handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _: FrameType | None) -> None:
        for other in _HANDLED:
            signal.signal(other, signal.SIG_IGN)  # the ranks are already being ended
        raise KeyboardInterrupt(f"signal {signal.Signals(number).name}")

    def first(number: int, _: FrameType | None) -> None:
        if number != signal.SIGUSR1:
            signal.signal(number, interrupt)
        assert warn is not None, "the handler is set with it alone"
        warn(signal.Signals(number).name)

    with handlers_restored((*_HANDLED, signal.SIGUSR1)) as before:
        for number, handler in before.items():
            if handler is signal.SIG_IGN:  # for example by nohup
                continue
            if warn is not None and number in _WARNINGS:
                signal.signal(number, first)
            elif number in _HANDLED:
                signal.signal(number, interrupt)
        yield


def _read(path: Path) -> Mapping[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        read = json.loads(path.read_text())
        if isinstance(read, dict) and {"message", "expected", "restarts", "time"} <= read.keys():
            return read
    return None


def newest_step(checkpoints: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    from tepo_megatron.checkpoint.folder import steps

    return max(steps(checkpoints), default=0)


class RestartPolicy:
    """Counts the restarts without progress. Progress is a newer complete checkpoint.

    Args:
        limit: Number of consecutive restarts without progress; 0: none.
    """

    def __init__(self, limit: int, checkpoints: Path) -> None:
        self._limit, self._checkpoints = limit, checkpoints
        self._newest, self._count = newest_step(self._checkpoints), 0

    def allow(self, failures: Mapping[int, RankFailure], kills: MemoryKills) -> str | None:
        """Count a failure of the ranks. Return how they are restarted, as text; None if they are not."""
        if not self._limit or not is_recoverable(failures, kills):
            return None
        newest = newest_step(self._checkpoints)
        if newest > self._newest:
            self._newest, self._count = newest, 0
        self._count += 1
        if self._count > self._limit:
            return None
        where = f"from the checkpoint of step {newest}" if newest else "from the start, because there is no checkpoint yet"
        return f"the ranks are restarted {where} (restart {self._count} of {self._limit} without a newer checkpoint)"


def is_recoverable(failures: Mapping[int, RankFailure], kills: MemoryKills) -> bool:
    """Return whether ranks may succeed where these failed: one was killed, hung, or failed unexpectedly.

    An error that is raised on purpose (a `TepoError`) would come again, unless a rank was killed, which may have caused it.
    """
    if any(was_killed(failure) for failure in failures.values()):
        return True
    message = failures[cause_of(failures, kills)].message
    return message is None or bool(message["restarts"])
