"""Measure wall time by phase."""

import contextlib
import time
from collections.abc import Iterator

from tepo_megatron.monitor.hang_watchdog import progress
from tepo_megatron.monitor.tracer import tracer


class Clock:
    """Sums of wall time by phase name.

    On a GPU a phase ends when its kernels have been launched, not when they have finished. Every phase of the training loop
    ends with a value read on the host, which waits for the kernels.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as phase `name`. Repeated blocks add up."""
        start = time.perf_counter()
        try:
            with progress.within(name), tracer.span(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block from the total."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - start

    @property
    def total(self) -> float:
        """Return the seconds since the clock was created, without paused blocks."""
        return time.perf_counter() - self._start
