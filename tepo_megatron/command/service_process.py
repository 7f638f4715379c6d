"""The rollout service as a child of the launcher, next to the ranks. It lives on while ranks are restarted.

Nothing has an address. For each rank 0 the launcher makes a socket pair: rank 0 inherits one end, and the service receives the
other over a socket pair that it inherited itself. The kernel ends the service with the launcher (PR_SET_PDEATHSIG).
"""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tepo_megatron.base.memory_kills import MemoryKills
from tepo_megatron.base.processes import die_with_parent, reap
from tepo_megatron.service.messages import CONTROL, ended

SERVICE = ("-P", "-m", "tepo_megatron.service.service")
# Limit since SIGTERM to the service: it stops its servers, which their guards end in any case; then SIGKILL
GRACE_SECONDS = 10.0


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
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            reap(self._process)
        self._control.close()
