"""Work that waits for an engine, in a thread beside the one that owns the collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

POLL_SECONDS = 0.05


class Nothing:
    """The stand-in on ranks other than 0."""

    @property
    def done(self) -> bool:
        """Whether the work is over."""
        return True

    def wait(self) -> tuple[bool, Any]:
        """What rank 0 shares instead."""
        return False, None


class Beside(Nothing):
    """future: of the work; weights_wanted: whether the engine asks for weights, without which the work may never end."""

    def __init__(self, future: Future[Any], weights_wanted: Callable[[], bool]) -> None:
        self._future, self._weights_wanted = future, weights_wanted

    @property
    def done(self) -> bool:
        """Whether the work is over."""
        return self._future.done()

    def wait(self) -> tuple[bool, Any]:
        """(True, None) when weights are wanted, (False, what the work made) when it is done. Raises what the work raises."""
        while not self._future.done():
            if self._weights_wanted():
                return True, None
            time.sleep(POLL_SECONDS)
        return False, self._future.result()
