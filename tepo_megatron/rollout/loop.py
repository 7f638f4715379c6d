"""An event loop in a thread of its own, for what goes on while the caller computes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines. Started by the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Its result, or its exception; Ctrl-C in the calling thread cancels it, and returns when it has ended."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin, and return at once."""
        return asyncio.run_coroutine_threadsafe(work, self._started())

    def stop(self) -> None:
        """Cancel all that is under way and end the thread. May be called again."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
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


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def streamed(
    loop: LoopThread, work: Callable[[Callable[[Item], None]], Coroutine[Any, Any, object]]
) -> Generator[Item, None, None]:
    """What `work` hands to the function that it is called with, as it comes; then what it raises. Closing cancels the work."""
    items: queue.SimpleQueue[tuple[Item] | None] = queue.SimpleQueue()
    working = loop.submit(work(lambda item: items.put((item,))))
    working.add_done_callback(lambda _: items.put(None))
    try:
        while (item := items.get()) is not None:
            yield item[0]
        working.result()
    finally:
        working.cancel()
