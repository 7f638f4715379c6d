"""An event loop in a thread of its own, for what goes on while the caller computes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from tepo_megatron.types import Prompt, Rollout, SamplingParams

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


class Arrivals:
    """See `engine.Groups`. begin: samples, and hands each group to the function that it is given, in `loop`."""

    def __init__(
        self,
        loop: LoopThread,
        begin: Callable[[Sequence[Prompt], SamplingParams, int, Callable[[list[Rollout]], None]], Coroutine[Any, Any, object]],
    ) -> None:
        self._loop, self._begin = loop, begin
        self._items: queue.SimpleQueue[list[Rollout] | Future[object]] = queue.SimpleQueue()
        self._working: set[Future[object]] = set()

    def add(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> None:
        """See `Groups.add`."""
        working = self._loop.submit(self._begin(prompts, sampling, seed, self._items.put))
        self._working.add(working)
        working.add_done_callback(self._items.put)

    def next(self) -> list[Rollout] | None:
        """See `Groups.next`."""
        while self._working:
            item = self._items.get()
            if isinstance(item, list):
                return item
            self._working.discard(item)
            item.result()
        return None

    def close(self) -> None:
        """See `Groups.close`."""
        for working in self._working:
            working.cancel()
        self._working, self._items = set(), queue.SimpleQueue()  # what they still say goes to the former queue
