"""Groups that are sampled in an event loop, delivered to a thread that waits for them."""

import queue
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from tepo_megatron.types import Prompt, Rollout, SamplingParams
from tepo_megatron.utils.loop import BLOCKED_SECONDS, LoopThread

# (prompts, sampling, seed, called with each group) -> the work of sampling them
Begin = Callable[[Sequence[Prompt], SamplingParams, int, Callable[[list[Rollout]], None]], Coroutine[Any, Any, object]]


class QueuedGroupStream:
    """Implementation of `engine.GroupStream` on an event loop."""

    def __init__(self, loop: LoopThread, begin: Begin) -> None:
        self._loop, self._begin = loop, begin
        self._items: queue.SimpleQueue[list[Rollout] | Future[object]] = queue.SimpleQueue()
        self._working: set[Future[object]] = set()

    def add(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> None:
        working = self._loop.submit(self._begin(prompts, sampling, seed, self._items.put))
        self._working.add(working)
        working.add_done_callback(self._items.put)

    def next(self) -> list[Rollout] | None:
        while self._working:
            try:
                item = self._items.get(timeout=BLOCKED_SECONDS)
            except queue.Empty:
                self._loop.require_running("sampling")
                continue
            if isinstance(item, list):
                return item
            self._working.discard(item)
            item.result(0)
        return None

    def close(self) -> None:
        for working in self._working:
            working.cancel()
        self._working, self._items = set(), queue.SimpleQueue()  # late results go to the old queue
