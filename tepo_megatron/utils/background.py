"""Run work that waits for an engine in a background thread, so that the thread that makes the collective calls can continue."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

POLL_SECONDS = 0.05


class NoTask:
    """The placeholder for the background work on ranks other than 0."""

    @property
    def done(self) -> bool:
        """Return whether the work has finished."""
        return True

    def wait(self) -> tuple[bool, Any]:
        """Return (False, None). Rank 0 broadcasts its own result instead."""
        return False, None


class BackgroundTask(NoTask):
    """Background work on rank 0.

    Args:
        future: Future of the work.
        weights_wanted: Returns whether the engine asks for weights. Without them the work may never finish.
    """

    def __init__(self, future: Future[Any], weights_wanted: Callable[[], bool]) -> None:
        self._future, self._weights_wanted = future, weights_wanted

    @property
    def done(self) -> bool:
        """Return whether the work has finished."""
        return self._future.done()

    def wait(self) -> tuple[bool, Any]:
        """Return (True, None) when the engine asks for weights, (False, result) when the work is done. Re-raise its errors."""
        while not self._future.done():
            if self._weights_wanted():
                return True, None
            time.sleep(POLL_SECONDS)
        return False, self._future.result()
