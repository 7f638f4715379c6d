"""The process that ends a test which hangs (limits.py). It reads lines: `start SECONDS FILE`, `keep PID...`, `end`."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from tepo_megatron.base.processes import die_with_parent, process_tree

_PY_SPY = Path(sysconfig.get_path("scripts"), "py-spy")
_PYTEST_FRAME = re.compile(r"\((_pytest|pytest|pluggy|xdist|execnet)/")
_DUMP_SECONDS = 20.0  # for the stacks of one process
_END_SECONDS = 10.0  # for processes that were killed to be gone


class Guard:
    """Watches a process that runs tests."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._kept: set[int] = set()  # processes of shared fixtures
        self._seconds, self._deadline, self._file = 0.0, float("inf"), Path()  # of the test that runs
        self._unread = b""

    def run(self) -> None:
        """Watch until stdin is closed."""
        while self._read(self._deadline - time.monotonic()):
            deadline = self._deadline
            if time.monotonic() < deadline:
                continue
            again = self._file.exists()
            report = f"{'still runs after another' if again else 'takes longer than'} {self._seconds:g} s\n{stacks(self._pid)}"
            if not self._read(0.0) or self._deadline != deadline:
                continue  # it has ended in the meantime
            print(f"\n{report}", file=sys.stderr, flush=True)
            partial = self._file.with_suffix(".partial")
            partial.write_text(report)
            partial.rename(self._file)
            self._deadline = time.monotonic() + self._seconds
            if again:
                self._kept = set()
            else:
                os.kill(self._pid, signal.SIGALRM)
            self._end_children()
            if again:
                os.kill(self._pid, signal.SIGKILL)

    def _read(self, seconds: float) -> bool:
        """Take the lines that come within `seconds`; False at the end of stdin."""
        if not select.select([0], [], [], None if seconds == float("inf") else max(0.0, seconds))[0]:
            return True
        received = os.read(0, 65536)
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            word, *rest = line.decode().split(" ", 2)
            if word == "start":
                self._seconds, self._file = float(rest[0]), Path(rest[1])
                self._deadline = time.monotonic() + self._seconds
            elif word == "keep":
                self._kept = {int(pid) for pid in " ".join(rest).split()}
            else:
                self._deadline = float("inf")
        return bool(received)

    def _end_children(self) -> None:
        limit = time.monotonic() + _END_SECONDS
        while time.monotonic() < limit:
            kept = self._kept.union(*({process.pid for process in process_tree(pid)} for pid in self._kept), {os.getpid()})
            doomed = [process.pid for process in process_tree(self._pid) if process.pid not in kept]
            if not doomed:
                return
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def stacks(pid: int) -> str:
    """Return the stacks of all threads of a process and its descendants, which stop for a moment; the process is the last."""
    tree = [process.pid for process in process_tree(pid) if process.pid != os.getpid()]
    return "\n".join(stack(pid) for pid in [*tree, pid])


def stack(pid: int) -> str:
    """Return the stacks of all threads of a process, and what it is."""
    folder, lines = Path("/proc") / str(pid), [f"process {pid}"]
    with contextlib.suppress(OSError):
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("State:"))
        lines = [f"process {pid}: {command[:300]}", f"{state}, in {(folder / 'wchan').read_text()}"]
    try:
        dump = subprocess.run(
            [_PY_SPY, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_DUMP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "\n".join([*lines, f"py-spy could not read its stacks in {_DUMP_SECONDS:g} s\n"])
    if dump.returncode != 0:  # a process without Python, or that this one may not read
        return "\n".join([*lines, *dump.stderr.splitlines()[:1], ""])
    frames = dump.stdout.splitlines()[2:]  # after its own two lines on the process
    return "\n".join([*lines, *(frame for frame in frames if not _PYTEST_FRAME.search(frame)), ""])


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    Guard(int(sys.argv[1])).run()
