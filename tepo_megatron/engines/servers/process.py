"""The process of an inference server: start it, wait until it is ready, watch it, and end all of its processes."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.memory_kills import MemoryKills
from tepo_megatron.base.processes import has_ended, kill_process_tree, wait_for_end
from tepo_megatron.base.progress import STUCK_SECONDS, StartProgress
from tepo_megatron.engines.servers import guard
from tepo_megatron.engines.servers.client import healthy

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.2
_ENDED_POLL_SECONDS = 0.02
# Limit since SIGTERM to a server: vLLM ends all its processes in 2 s, also while it loads a model; then SIGKILL
GRACE_SECONDS = 10.0
# An error message shows the last LOG_LINES lines of the log, and up to LOG_CAUSES distinct errors from above them.
LOG_LINES = 20
LOG_CAUSES = 3
LOG_BYTES = 65536
_START = b"=== start "
_ERROR = re.compile(rb"(?<![^ ])[\w.]+(Error|Exception): .+")
_REFUSED = re.compile(r"^[\w.]+: error: (.*argument.*)\Z", re.MULTILINE)  # of argparse, at the end of the log
# Output of extension modules while an interpreter exits after an error: it would push the error out of the tail.
_NOISE = re.compile(rb"nanobind:|^ - (leaked |\.\.\. skipped)|resource_tracker|^\s*warnings\.warn\(|^See https://nanobind")


def hold_port(port: int, host: str = LOOPBACK) -> socket.socket:
    """Return a socket bound to a port, 0 for a free one. Nobody else is given it as a free one until the socket is closed.

    A server can listen on that port meanwhile: this socket and those of the engines set SO_REUSEADDR.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Connections of an earlier run that are still closing must not block the port.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as e:
        held.close()
        raise RolloutError(
            f"port {port} cannot be used on {host} ({e.strerror}); stop what listens there, or give an address of this machine"
        ) from None
    return held


class ServerProcess:
    """A server that runs under a guard (`guard.py`).

    All of its processes end with `stop`, or with this process however that ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        health_url: str,
        log_path: Path,
        ready_seconds: float,
        name: str = "the inference server",
        folder: Path | None = None,
    ) -> None:
        self._name, self._folder, self._log_path = name, folder, log_path
        self._command, self._env = list(command), dict(env)
        self._health_url, self._ready_seconds = health_url, ready_seconds
        self._guard: subprocess.Popen[bytes] | None = None
        self._ending = threading.Lock()
        self._kills = MemoryKills()
        self._deadline = 0.0
        self._log_start = 0  # size of the log before this start, in bytes

    def start(self) -> None:
        """Start the command and return at once. Raises RolloutError if the log file cannot be written."""
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            log = self._log_path.open("a+b")
            self._log_start = _begin(log)
        except OSError as e:
            raise RolloutError(f"{self._log_path}: cannot write the log of the inference server ({e.strerror})") from None
        guarded = [sys.executable, "-P", "-m", guard.__name__, str(os.getpid()), str(GRACE_SECONDS), str(self._folder or "-")]
        with log:
            # A separate session: Ctrl-C in the terminal reaches only this process, which then stops the server in order.
            self._guard = subprocess.Popen(
                [*guarded, *self._command],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # A thread notices a killed guard at once, whatever this process is doing.
        threading.Thread(target=self._watch, args=(os.pidfd_open(self._guard.pid),), name="tepo-server", daemon=True).start()
        self._deadline = time.monotonic() + self._ready_seconds

    def _watch(self, guard_ended: int) -> None:
        try:
            wait_for_end(guard_ended)
        finally:
            os.close(guard_ended)
        self._has_ended()

    @property
    def guard_pid(self) -> int | None:
        """Process ID of the guard, whose descendants are the server's processes; None before `start`."""
        return None if self._guard is None else self._guard.pid

    @property
    def running(self) -> bool:
        """Return whether the server's first process lives, and the guard that would end the others."""
        return self._guard is not None and not self._has_ended()

    def _has_ended(self, seconds: float = 0.0) -> bool:
        """Return whether the guard has ended, or ends within `seconds`. If so, no process of the server is left.

        A killed guard ended no process, so the server's session is ended here. The session id is the guard's pid, which the
        kernel does not reuse before the guard is waited for.
        """
        assert self._guard is not None
        deadline = time.monotonic() + seconds
        with self._ending:  # several threads call this
            while self._guard.returncode is None:
                if has_ended(self._guard.pid):
                    kill_process_tree(self._guard.pid, guard.KILLED_SECONDS)
                    self._guard.poll()
                elif time.monotonic() >= deadline:
                    return False
                else:
                    time.sleep(min(_ENDED_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        return True

    @property
    def resident_bytes(self) -> int:
        """Sum of the resident set sizes of all processes of the server, in bytes."""
        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def _processes(self) -> list[psutil.Process]:
        if self._guard is not None and self.running:
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                return psutil.Process(self._guard.pid).children(recursive=True)
        return []

    def wait_ready(self) -> None:
        """Return when `health_url` answers 200.

        Raises RolloutError if the server ends, makes no progress, or is not ready `ready_seconds` after `start`.
        """
        assert self._guard is not None
        progress, most_idle = StartProgress(self._guard.pid, self._log_path), max(STUCK_SECONDS, self._ready_seconds / 12)
        while self.running:
            if asyncio.run(healthy(self._health_url, path="")):
                return
            lacking = f"{self._health_url} did not answer with 200"
            if time.monotonic() > self._deadline:
                raise self.failure(
                    f"was not ready after {self._ready_seconds:g} s: {lacking}; raise rollout.server.ready_seconds, or fix "
                    "what its log shows"
                )
            if (idle := progress.idle_seconds()) > most_idle:
                raise self.failure(
                    f"is stuck in its start: for {idle:.0f} s its log did not grow and its processes used neither a disk "
                    f"nor CPU time, and {lacking}; fix what its log shows, or raise rollout.server.ready_seconds to twelve "
                    "times what it may be idle"
                )
            time.sleep(POLL_SECONDS)
        raise self.failure("could not start")

    def ends_within(self, seconds: float) -> bool:
        """Return whether the server has ended, or ends within `seconds`.

        A broken connection is seen before the death that caused it.

        If the server's first process has ended by then, wait longer for the others, which the guard is ending: on a busy
        machine freeing the memory of an engine takes seconds.
        """
        if self._guard is None or self._has_ended(seconds):
            return True
        return not _leader_lives(self._guard.pid) and self._has_ended(2 * guard.KILLED_SECONDS)

    def failure(self, what: str) -> RolloutError:
        """Return an error that says `what` the server did, whether it has ended, what the kernel killed, and how its log ends.

        vLLM's API server outlives an engine that the kernel kills for memory: it refuses connections, and ends by itself.
        """
        if refused := _REFUSED.search(tail := self.log_tail()):  # the words of this project are known to it
            return RolloutError(f"{self._name} refuses rollout.server.extra_args: {refused[1]}; its log: {self._log_path}")
        status = None if self.running or self._guard is None else self._guard.returncode
        ended = "" if self.running else " (it has ended)"
        if status is not None:
            why = f": {self._kills.explain()}" if status == 128 + signal.SIGKILL and self._kills.seen() else ""
            # 128 + n: signal n ended the server
            how = f"by {signal.Signals(status - 128).name}" if status > 128 else f"with exit status {status}"
            ended = f" (it has ended {how}{why})"
        if status != 128 + signal.SIGKILL and (hint := self._kills.hint()):
            ended += f"; {hint}"
        shown = f"its log, {self._log_path}, ends:\n{tail}" if tail else f"its log, {self._log_path}, is empty"
        return RolloutError(f"{self._name} {what}{ended}; {shown}")

    def log_tail(self) -> str:
        """Return the last lines of the log since `start`, preceded by earlier errors: the first cause is often far up."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(self._log_start, os.fstat(log.fileno()).st_size - LOG_BYTES))
                written = log.read().splitlines()
        except OSError:
            return ""
        kept = [line for line in written if line.strip() and not _NOISE.search(line)]
        tail = kept[-LOG_LINES:]
        causes = {match[0]: None for line in kept[:-LOG_LINES] if (match := _ERROR.search(line))}
        earlier = [cause for cause in causes if not any(cause in line for line in tail)][-LOG_CAUSES:]
        return b"\n".join([*earlier, *([b"..."] if earlier else []), *tail]).decode(errors="replace")

    def stop(self, at_once: bool = False) -> None:
        """End every process of the server, within GRACE_SECONDS and a few more seconds. May be called again."""
        if self._guard is None or self._has_ended():
            return
        self._guard.send_signal(guard.AT_ONCE if at_once else signal.SIGTERM)
        if not self.ends_within(GRACE_SECONDS + 2 * guard.KILLED_SECONDS):
            self._guard.kill()
            self._has_ended(guard.KILLED_SECONDS)


def _leader_lives(guard_pid: int) -> bool:
    """Return whether the server's first process lives.

    It is the process-group leader among the guard's children; orphans of the server are the guard's children, too.
    """
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        for child in psutil.Process(guard_pid).children():
            if os.getpgid(child.pid) == child.pid:
                return bool(child.status() != psutil.STATUS_ZOMBIE)
    return False


def _begin(log: BinaryIO) -> int:
    log.seek(0)
    number, last = 1, b"\n"
    for last in log:
        number += last.startswith(_START)
    end = b"" if last.endswith(b"\n") else b"\n"  # completes a line that a kill cut off
    log.write(end + _START + f"{number} at {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n".encode())
    log.flush()
    return log.tell()
