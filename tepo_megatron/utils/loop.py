"""An event loop in its own thread, for work that runs while the caller computes, and a time limit for such work."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

LATE_SECONDS = 1.0  # a timer that is later than this was held up by a stopped process or a blocked event loop


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Limit a block like `asyncio.timeout`, but let what came in time count when the event loop is late to look at it.

    Where the loop did not run when the limit passed, `asyncio.timeout` cancels the block before it sees what has arrived
    meanwhile. Here the block goes on for as long again as the loop was late.
    """
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def look(due: float) -> None:
        late = loop.time() - due
        if late > LATE_SECONDS:
            wait(late)
        else:
            limit.reschedule(loop.time())

    def wait(seconds: float) -> None:
        timers.append(loop.call_later(seconds, look, loop.time() + seconds))

    async with asyncio.timeout(None) as limit:
        wait(seconds)
        try:
            yield limit
        finally:
            timers[-1].cancel()


Result = TypeVar("Result")


class LoopThread:
    """Event loop in a daemon thread. The first coroutine starts the thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result or raise its exception. Ctrl-C in the calling thread cancels the coroutine."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine and return its future at once."""
        return asyncio.run_coroutine_threadsafe(work, self._started())

    def stop(self) -> None:
        """Cancel all coroutines, wait for them, and end the thread. May be called again."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
            self._thread.start()
        return self._loop


async def cancel_others() -> None:
    """Cancel all other tasks of the running loop, and wait for them."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
