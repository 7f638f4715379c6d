"""Start the rollout service from rank 0, or find the one that a former rank 0 of the same supervisor has left.

    supervisor   parent of the service   how they talk                        the service ends with
    none         rank 0                  a socket pair                        rank 0
    given        a guard                a UNIX socket in a private folder    the guard, which ends with the supervisor

The supervisor is the launcher, which starts rank 0 again after a failure. See `utils/service_guard.py`.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from tepo_megatron.controller.messages import DESCRIPTOR, LISTENER
from tepo_megatron.controller.service_client import Process, ServiceClient
from tepo_megatron.errors import RolloutError
from tepo_megatron.limits import START_SECONDS
from tepo_megatron.utils import service_guard
from tepo_megatron.utils.processes import LIFELINE, die_with_parent, has_ended
from tepo_megatron.utils.progress import STUCK_SECONDS, StartProgress
from tepo_megatron.utils.scratch import PrivateFolder

if TYPE_CHECKING:
    from tepo_megatron.controller.opening import EngineFactory

_COMMAND = (sys.executable, "-P", "-m", "tepo_megatron.controller.service")
_POLL_SECONDS = 0.02


class ForkedProcess:
    """A fork of this process that runs one function. For engines that exist in this process alone."""

    def __init__(self, work: Callable[[], None]) -> None:
        parent = os.getpid()
        self._status: int | None = None  # exit status, once it is known
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent(parent)
                torch.set_num_threads(torch.get_num_threads())  # renews the pool of the fork, before two threads do so at once
                work()
            except BaseException as e:
                sys.excepthook(type(e), e, e.__traceback__)
                os._exit(1)
            os._exit(0)

    def wait(self, timeout: float) -> int:
        """Return the exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise subprocess.TimeoutExpired("the rollout service", timeout)
            else:
                time.sleep(0.01)
        return self._status

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)


class GuardedService:
    """A service whose parent is a service_guard. This process may be its parent's parent, or no relative at all."""

    def __init__(self, folder: Path, guard_pid: int, pid: int) -> None:
        self.pid = pid
        # opened now, because the guard removes the folder when it ends
        self._status, self._guard = os.open(folder / service_guard.STATUS, os.O_RDONLY), os.pidfd_open(guard_pid)

    def wait(self, timeout: float) -> int:
        """Return the service's exit status, once the guard has ended. Raises subprocess.TimeoutExpired."""
        if not select.select([self._guard], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("the rollout service", timeout)
        return int(os.pread(self._status, 16, 0) or -signal.SIGKILL)  # a killed guard writes none

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def start_service(
    silence_seconds: float,
    start_seconds: float = START_SECONDS,
    make_engine: "EngineFactory | None" = None,
    supervisor: int | None = None,
) -> Iterator[ServiceClient]:
    """Yield a client of the rollout service. A new service imports its modules meanwhile and waits for the call `open`.

    Call it before this process joins a process group or starts threads of its own. When the block ends, the service is closed;
    after an error it is left to the next rank 0 if there is a supervisor. `supervisor`: pid of the process that restarts rank
    0. None: the service ends with rank 0.
    """
    if supervisor is None:
        connection, process = _start_child(make_engine)
        client = ServiceClient(connection, process, silence_seconds, start_seconds)
    else:
        folder = service_guard.folder_of(supervisor)
        client = _find(folder, silence_seconds, start_seconds) or _start_kept(
            folder, supervisor, silence_seconds, start_seconds, make_engine
        )
    try:
        yield client
    except BaseException:
        if supervisor is None:
            client.close()
        client.leave()
        raise
    client.close()


def _start_child(make_engine: "EngineFactory | None") -> tuple[Connection, Process]:
    ours, theirs = multiprocessing.Pipe()
    process: Process
    if make_engine is None:
        environment, parent = {**os.environ, DESCRIPTOR: str(theirs.fileno())}, os.getpid()
        process = subprocess.Popen(
            _COMMAND,
            env=environment,
            pass_fds=[theirs.fileno(), *_lifeline()],
            preexec_fn=lambda: die_with_parent(parent),
        )
    else:

        def serve() -> None:
            from tepo_megatron.controller.service import serve

            ours.close()
            serve(theirs, make_engine)

        process = ForkedProcess(serve)
    theirs.close()
    return ours, process


def _find(folder: Path, silence_seconds: float, start_seconds: float) -> ServiceClient | None:
    """Return a client of the living service in a folder. None: there is none, or it has just ended."""
    until = time.monotonic() + start_seconds
    while folder.exists() and service_guard.is_held(folder):
        pids, connection = service_guard.read_pids(folder), service_guard.connect(folder)
        if connection is not None and pids is not None:
            with contextlib.suppress(OSError):  # it ends now
                process = GuardedService(folder, *pids)
                return ServiceClient(_as_connection(connection), process, silence_seconds, start_seconds, found=True)
        if connection is not None:
            connection.close()
        if time.monotonic() > until:
            raise RolloutError(
                f"{folder}: the former rollout service neither answered nor ended within {start_seconds:g} s "
                "(parallel.start_seconds); end its processes"
            )
        time.sleep(_POLL_SECONDS)  # it starts, or ends
    return None


def _start_kept(
    folder: Path, supervisor: int, silence_seconds: float, start_seconds: float, make_engine: "EngineFactory | None"
) -> ServiceClient:
    lock = service_guard.claim(folder)
    listener = service_guard.listen(folder)
    if make_engine is None:
        os.environ[LISTENER] = str(listener.fileno())
        guard = service_guard.start(supervisor, folder, lock, _COMMAND, [listener.fileno(), *_lifeline()])
        del os.environ[LISTENER]
    elif (guard := os.fork()) == 0:
        _guard_fork(supervisor, PrivateFolder(folder, lock), listener, make_engine)
    os.close(lock)
    connection = service_guard.connect(folder)
    progress = StartProgress(guard)
    while (pids := service_guard.read_pids(folder)) is None:
        if has_ended(guard):
            raise RolloutError("the guard of the rollout service ended in its start; its last lines are above")
        if (idle := progress.idle_seconds()) > STUCK_SECONDS:
            raise RolloutError(f"the guard of the rollout service is stuck in its start: it did nothing for {idle:.0f} s")
        time.sleep(_POLL_SECONDS)
    listener.close()
    assert connection is not None, "the socket listens"
    return ServiceClient(_as_connection(connection), GuardedService(folder, *pids), silence_seconds, start_seconds)


def _guard_fork(supervisor: int, folder: PrivateFolder, listener: socket.socket, make_engine: "EngineFactory") -> NoReturn:
    def serve_fork(parent: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            service_guard.before_service(parent)
            torch.set_num_threads(torch.get_num_threads())  # renews the pool of the fork
            from tepo_megatron.controller.service import serve_successive

            serve_successive(listener, make_engine)
            status = 0
        except BaseException as e:
            sys.excepthook(type(e), e, e.__traceback__)
        os._exit(status)

    os.setsid()
    service_guard.watch(supervisor, folder, partial(serve_fork, os.getpid()))
    os._exit(0)


def _as_connection(connection: socket.socket) -> Connection:
    return Connection(connection.detach())


def _lifeline() -> list[int]:
    return [int(os.environ[LIFELINE])] if LIFELINE in os.environ else []
