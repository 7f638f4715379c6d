"""Seconds by phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from tepo_megatron.watch import here


class Clock:
    """Adds up wall time by phase name.

    On a GPU a phase ends when its kernels were launched, not when they ended; every phase of the loop ends with a value read on
    the host, which waits for them.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as `name`; repeated blocks add up."""
        start = time.perf_counter()
        try:
            with here.within(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out of the total."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - start

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start
