"""Progress of a start: a process that works is waited for, however slow its machine is, and one that does nothing is not."""

import contextlib
import time
from pathlib import Path

import psutil

# Limit since the last progress of a start (log, disk, CPU time): a file system that does not answer blocks it for minutes; then
# `is stuck in its start`
STUCK_SECONDS = 300.0
# Limit since a grading worker was started: imports take 10 minutes on a cold file system; then `was not ready after`; a start
START_SECONDS = 3600.0
LOOK_SECONDS = 10.0  # between two looks
WORKING = 0.01  # part of a core that a starting process uses at least; polling for something takes less


class StartProgress:
    """The time for which a process, its descendants and their log have done nothing."""

    def __init__(self, pid: int, log: Path | None = None) -> None:
        self._pid, self._log = pid, log
        self._done, self._looked, self._since = self._work(), time.monotonic(), 0.0
        self._idle = 0.0

    def idle_seconds(self) -> float:
        """Return the seconds since the last progress that was seen. Call it at least every LOOK_SECONDS.

        A longer pause between two calls was a stop of this process, perhaps of the other one as well, and counts as one.
        """
        passed = time.monotonic() - self._looked
        if passed >= LOOK_SECONDS:
            self._looked, done = time.monotonic(), self._work()
            self._since += passed
            moved, cpu = self._done[:-1] != done[:-1], abs(done[-1] - self._done[-1])
            if moved or cpu >= WORKING * self._since:
                self._done, self._idle, self._since = done, 0.0, 0.0
            else:
                self._idle += min(passed, 2 * LOOK_SECONDS)
        return self._idle

    def _work(self) -> tuple[float, ...]:
        """Return bytes in the log, bytes read and written, and CPU seconds of all processes, those that have ended included."""
        moved, cpu, processes = 0, 0.0, []
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._pid)
            processes = [root, *root.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                cpu += sum(process.cpu_times()[:4])
                moved += sum(process.io_counters()[2:4])
        return self._log.stat().st_size if self._log else 0, moved, cpu
