"""Run the calls of a user's generation function in a thread, and abandon the thread if one of them blocks it.

A call that computes or sleeps without `await` stops the thread's event loop, so no deadline in that loop can fire. The deadline
is therefore kept in the loop of those who wait. All other calls in the thread are made again, in a new thread.
"""

import asyncio
import contextvars
import ctypes
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.loop import cancel_others
from tepo_megatron.rollout.containment import CANCEL_SECONDS, OverLimit, caught

# Limit since the end of the run: calls were cancelled before; then a call that blocks its thread is left behind
CLOSE_SECONDS = 5.0
MOST_ABANDONED = 8  # threads that were abandoned and still run

Work = Callable[[], Coroutine[Any, Any, object]]


class ThreadAbandoned(Exception):
    """Another call blocked the thread of this one, which is to be made again."""


class TooManyThreads(RolloutError):
    """More calls block their threads than the process can bear."""


class FunctionThread:
    """The thread of the calls. Use it from one event loop."""

    def __init__(self, seconds: float, renew: Callable[[], None]) -> None:
        self._seconds, self._renew = seconds, renew
        self._thread: _Thread | None = None
        self._started = False
        self._watching: asyncio.Task[None] | None = None
        self._abandoned: list[_Thread] = []

    async def run(self, work: Work) -> object:
        """Return the result of a coroutine that runs in the thread, or raise its error.

        Raises:
            OverLimit: It blocked the thread past its deadline.
            ThreadAbandoned: Another call did.
            TooManyThreads: More than MOST_ABANDONED threads are blocked.
        """
        if (thread := self._thread) is None:
            if self._started:
                self._renew()
            thread, self._started = _Thread(), True
            self._thread = thread
        call = _Call(work)
        thread.calls.append(call)
        thread.soon(lambda: thread.begin(call))
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            return await asyncio.shield(call.outcome)
        except asyncio.CancelledError:
            thread.soon(call.cancel)
            await asyncio.wait({call.outcome}, timeout=1.5 * CANCEL_SECONDS)
            raise
        finally:
            thread.calls.remove(call)

    def close(self) -> None:
        """End the thread, whose calls have been cancelled; bounded in time. May be called again."""
        if self._thread is not None:
            self._thread.end(CLOSE_SECONDS)
            self._thread = None

    async def _watch(self) -> None:
        """Abandon each thread that does not answer, as long as calls are running."""
        while (thread := self._thread) is not None and thread.calls:
            if await thread.answers(self._seconds):
                await asyncio.sleep(min(1.0, self._seconds / 4))
            else:
                self._abandon(thread)

    def _abandon(self, thread: "_Thread") -> None:
        """Fail the call that blocks the thread, or all of them if it is not known, and have the others made again."""
        blocking = thread.running_call()
        thread.end(0)
        self._thread = None
        self._abandoned = [each for each in (*self._abandoned, thread) if each.alive]
        for call in thread.calls:
            if len(self._abandoned) > MOST_ABANDONED:
                call.fail(TooManyThreads(f"{len(self._abandoned)} calls of rollout.function block their threads; {_HINT}"))
            elif blocking is None or call is blocking:
                call.fail(OverLimit(f"timed out after rollout.limits.seconds={self._seconds:g}: it blocks its thread; {_HINT}"))
            else:
                call.fail(ThreadAbandoned("another sample blocked the thread of rollout.function"))


_HINT = "await whatever takes long, or run it in a process of its own"
_running: contextvars.ContextVar["_Call | None"] = contextvars.ContextVar("_running", default=None)


class _Interrupted(BaseException):
    pass


class _Call:
    """A call of the function. Its outcome belongs to the event loop of the caller."""

    def __init__(self, work: Work) -> None:
        self._work, self._caller = work, asyncio.get_running_loop()
        self.outcome: asyncio.Future[object] = self._caller.create_future()
        self._task: asyncio.Task[tuple[object, BaseException | None]] | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.outcome.done():
            return
        _running.set(self)
        self._task = loop.create_task(caught(self._work()))
        self._task.add_done_callback(self._report)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def fail(self, error: Exception) -> None:
        """End the call with an error. This runs in the caller's loop."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def _report(self, task: asyncio.Task[tuple[object, BaseException | None]]) -> None:
        with suppress(RuntimeError):  # the caller's loop was closed
            self._caller.call_soon_threadsafe(self._settle, task)

    def _settle(self, task: asyncio.Task[tuple[object, BaseException | None]]) -> None:
        if self.outcome.done():
            return
        if task.cancelled():
            self.outcome.cancel()
            return
        result, error = task.result()
        if error is None:
            self.outcome.set_result(result)
        else:
            self.outcome.set_exception(error)


class _CallTask(asyncio.Task[Any]):
    """A task that knows for which call it, or the task that started it, was started."""

    call: _Call | None = None


def _call_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
) -> _CallTask:
    task = _CallTask(work, loop=loop, **options)
    task.call = _running.get()
    return task


class _DaemonThreads(ThreadPoolExecutor):
    """Runs each call of `asyncio.to_thread` in a daemon thread of its own.

    Calls that never return would use up the threads of a pool, and Python would wait for them at its end.
    """

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*args, **kwargs))
                except BaseException as e:
                    future.set_exception(e)

        threading.Thread(target=run, name="generation function: to_thread", daemon=True).start()
        return future


class _Thread:
    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(_call_task)
        self._loop.set_default_executor(_DaemonThreads())
        self._thread = threading.Thread(target=self._serve, name="generation function", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def soon(self, work: Callable[[], object]) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work, context=contextvars.copy_context())

    def begin(self, call: _Call) -> None:
        """Start a call. This runs in the thread, in a context of its own."""
        call.begin(self._loop)

    async def answers(self, seconds: float) -> bool:
        """Return whether the thread is free within a time. A process that was stopped gets a moment more."""
        call = _Call(_nothing)
        self.soon(lambda: self.begin(call))
        for time in (seconds, CANCEL_SECONDS):
            await asyncio.wait({call.outcome}, timeout=time)
        return call.outcome.done()

    def running_call(self) -> _Call | None:
        """Return the call whose code runs now; None if it is not known, as in a callback of the loop."""
        task = asyncio.current_task(self._loop)
        return task.call if isinstance(task, _CallTask) else None

    def end(self, seconds: float) -> None:
        """Cancel the calls and end the thread. If it does not end in time, interrupt the Python code in it and leave it behind.

        Code that sleeps or waits without Python goes on until it returns.
        """
        self.soon(self._loop.stop)
        self._thread.join(seconds)
        if self.alive:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_Interrupted))

    def _serve(self) -> None:
        with suppress(_Interrupted):
            self._loop.run_forever()
        # Tasks that ignore their cancellation stay in the thread for good. Python would run on in them if they were collected.
        while asyncio.all_tasks(self._loop):
            with suppress(_Interrupted):
                self._loop.run_until_complete(cancel_others(seconds=CLOSE_SECONDS))
        self._loop.close()


async def _nothing() -> None:
    pass
