"""An event loop in its own thread, for work that runs while the caller computes, and a time limit for such work."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as futures_wait
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
# Limit since the last turn of an event loop: opening thousands of connections blocks it for seconds; then LoopBlocked, which
# names the coroutine
BLOCKED_SECONDS = 300.0
CANCEL_SECONDS = 60.0  # limit since the cancellation of coroutines: each has only to return; then they are left behind
LATE_SECONDS = 1.0  # not a limit: a timer that is later was held up by a stopped process or a blocked event loop


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


class LoopBlocked(RuntimeError):
    """An event loop does not run, so that what waits in it can neither end nor reach its own time limit."""


class LoopFuture(Future[Result]):
    """The result of a coroutine in a `LoopThread`."""

    def __init__(self, loop: "LoopThread", what: str) -> None:
        super().__init__()
        self._loop, self._what = loop, what

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result, without `timeout` as long as the event loop runs. Raises LoopBlocked, which names the coroutine.

        Every request and process that a coroutine waits for has a limit of its own, which needs the event loop.
        """
        while timeout is None and not self.done():
            with contextlib.suppress(TimeoutError):  # of this wait; one of the coroutine is raised below
                return super().result(BLOCKED_SECONDS)
            self.require_running()
        return super().result(timeout)

    def require_running(self) -> None:
        """Raise LoopBlocked if it is not done, and the event loop does not run."""
        if not self.done():
            self._loop.require_running(self._what)


def first_done(futures: set[Future[Result]], at_once: bool) -> tuple[set[Future[Result]], set[Future[Result]]]:
    """Return (futures that are done, the others). Wait for the first unless `at_once`. Raises LoopBlocked."""
    while True:
        done, others = futures_wait(futures, 0 if at_once else BLOCKED_SECONDS, FIRST_COMPLETED)
        if done or at_once:
            return done, others
        for future in futures:
            if isinstance(future, LoopFuture):
                future.require_running()


class LoopThread:
    """Event loop in a daemon thread. The first coroutine starts the thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result or raise its exception. Ctrl-C in the calling thread cancels the coroutine."""
        future: LoopFuture[Result] = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, Result]) -> LoopFuture[Result]:
        """Start a coroutine and return its future at once."""
        loop, future = self._started(), LoopFuture[Result](self, work.__qualname__)

        def begin() -> None:
            task = loop.create_task(work)
            task.add_done_callback(lambda task: _copy(task, future))
            future.add_done_callback(lambda future: _soon(loop, task.cancel) if future.cancelled() else None)

        loop.call_soon_threadsafe(begin)
        return future

    def require_running(self, what: str) -> None:
        """Raise LoopBlocked if the event loop, in which `what` goes on, does not make a turn."""
        turned = threading.Event()
        _soon(self._started(), turned.set)
        if not turned.wait(BLOCKED_SECONDS):
            raise LoopBlocked(f"the event loop {self._name} has not run for {BLOCKED_SECONDS:g} s; {what} waits in it")

    def stop(self) -> None:
        """Cancel all coroutines, wait for them, and end the thread. May be called again. A blocked loop is left to itself."""
        if self._loop is None or self._thread is None:
            return
        loop, thread = self._loop, self._thread
        others = asyncio.run_coroutine_threadsafe(cancel_others(seconds=CANCEL_SECONDS), loop)
        self._loop = self._thread = None
        try:
            others.result(BLOCKED_SECONDS)
        except TimeoutError:
            _log.error("the event loop %s did not end its coroutines within %g s", self._name, BLOCKED_SECONDS)
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(BLOCKED_SECONDS)
        loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
            self._thread.start()
        return self._loop


def _copy(task: asyncio.Task[Result], future: Future[Result]) -> None:
    if task.cancelled():
        future.cancel()
    if future.set_running_or_notify_cancel():
        if (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


def _soon(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(work)


async def cancel_others(seconds: float) -> None:
    """Cancel all other tasks of the running loop, and wait for them, but at most so long: a task may ignore it."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    done = (await asyncio.wait(others, timeout=seconds))[0] if others else set()
    for task in done:
        task.cancelled() or task.exception()  # nobody else retrieves it
    await asyncio.get_running_loop().shutdown_asyncgens()
