"""The rollout service: a process next to rank 0 that owns prompts, engine, servers, graders, record and log of a run.

Rank 0 starts it and is its only client (`service_client.py`). They exchange pickled messages over a socket pair, which has no
address, so that no other process can connect. The service ends when rank 0 closes its end, and with rank 0 however that ends.

    thread    does
    reader    receives calls, and answers `ping` at once
    main      makes the calls in their order; starts the servers, which would end with another thread
    rollout   samples, grades and evaluates
    waiters   wait for what the rollout thread does
"""

import contextlib
import gc
import os
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tepo_megatron.config import Config
from tepo_megatron.controller.batch_memory import BatchHeader
from tepo_megatron.controller.main_driver import MainDriver
from tepo_megatron.controller.messages import DESCRIPTOR, Answer, Call, Waited
from tepo_megatron.controller.opening import EngineFactory, open_driver
from tepo_megatron.errors import RolloutError, StorageError, TepoError
from tepo_megatron.utils.quiet import quiet_upstream
from tepo_megatron.utils.save_requests import LOOK_SECONDS, STOP, asked, take_save
from tepo_megatron.utils.storage import disk_fault

POLL_SECONDS = 0.05


class _End(NamedTuple):
    """Rank 0 has closed the connection."""


@dataclass
class _Task:
    """Work of the rollout thread.

    Attributes:
        future: Its end.
        minibatches: The minibatches that were there before its end.
        received: Number of minibatches that rank 0 has received.
    """

    future: Future[Any]
    minibatches: list[BatchHeader] = field(default_factory=list)
    received: int = 0


class RolloutService:
    """Makes the calls of rank 0 on the driver of the run, on its engine, or on itself.

    Args:
        connection: This process's end of the connection.
        make_engine: Makes an engine to use instead of the one that the config names.
    """

    def __init__(self, connection: Connection, make_engine: EngineFactory | None) -> None:
        self._connection, self._make_engine = connection, make_engine
        self._sending = threading.Lock()
        self._calls: queue.SimpleQueue[Call | _End] = queue.SimpleQueue()
        self._cfg: Config | None = None
        self._driver: MainDriver | None = None
        self._tasks: dict[int, _Task] = {}  # by number of the call that started it
        # one thread for all work, because the graders that a thread starts are ended when the thread ends
        self._rollout = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._waiters = ThreadPoolExecutor(thread_name_prefix="waiter")

    def run(self) -> None:
        """Make calls until rank 0 closes the connection; then end the engine."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        with contextlib.ExitStack() as stack:
            while isinstance(call := self._calls.get(), Call):
                self._answer(call, partial(self._make, call, stack))

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                call = self._connection.recv()
                if call.name == "ping":
                    self._send(Answer(call.number, None, None))
                elif call.name == "wait":
                    self._waiters.submit(self._answer, call, partial(self._wait, *call.args))
                else:
                    self._calls.put(call)
        self._calls.put(_End())

    def _open(self, stack: contextlib.ExitStack, cfg: Config) -> None:
        self._cfg = cfg
        self._driver = stack.enter_context(open_driver(cfg, self._make_engine))

    def _make(self, call: Call, stack: contextlib.ExitStack) -> Any:
        """Make one call and return its result; a future is answered once it is done. The driver is open within the stack."""
        name, args = call.name, call.args
        match name:
            case "open":
                self._open(stack, *args)
            case "close":
                stack.close()
            case "collect":
                minibatches: list[BatchHeader] = []
                future = self._rollout.submit(partial(self._started.collect, args[0], minibatches.append))
                self._tasks[call.number] = _Task(future, minibatches)
            case "evaluate":
                self._tasks[call.number] = _Task(self._rollout.submit(self._started.evaluate, *args))
            case "done":
                return self._tasks[args[0]].future.done()
            case _:
                owner, _, attribute = name.rpartition(".")
                target = getattr(self._started.engine if owner == "engine" else self._started, attribute)
                return target(*args) if callable(target) else target
        return None

    @property
    def _started(self) -> MainDriver:
        assert self._driver is not None, "the first call is open"
        return self._driver

    def _wait(self, number: int) -> Waited:
        """Wait for a task, for one of its minibatches, or for what the ranks have to do meanwhile.

        A request to end the run comes before the result, unless rank 0 trains on minibatches of it already.
        """
        assert self._cfg is not None
        engine, task, trains = self._started.engine, self._tasks[number], not self._cfg.rollout.only
        look = 0.0
        while True:
            done = task.future.done()
            if trains and not task.received and (time.monotonic() >= look or done):
                look = time.monotonic() + LOOK_SECONDS
                if asked(self._cfg.run_dir, STOP):
                    return Waited("stop")
            if task.received < len(task.minibatches):
                task.received += 1
                return Waited("minibatch", task.minibatches[task.received - 1])
            if done:
                return Waited("done", self._tasks.pop(number).future.result(), save=trains and take_save(self._cfg.run_dir))
            if engine is not None and trains and engine.needs_weights:
                return Waited("weights")
            time.sleep(POLL_SECONDS)

    def _answer(self, call: Call, make: Callable[[], Any]) -> None:
        try:
            result = make()
        except Exception as e:
            self._send(Answer(call.number, None, self._error(e)))
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._answer(call, done.result))
        else:
            self._send(Answer(call.number, result, None))

    def _error(self, e: Exception) -> Exception:
        """Return the error as rank 0 raises it: our own in its class of `errors.py`, any other as its traceback.

        A subclass may lie in a module that no rank imports, and may not survive pickling.
        """
        if isinstance(e, TepoError):
            return next(kind for kind in type(e).__mro__ if kind.__module__ == TepoError.__module__)(str(e))
        fault = None if self._cfg is None else disk_fault(e, self._cfg.run_dir, written=False)
        return StorageError(fault) if fault is not None else RuntimeError("".join(traceback.format_exception(e)).rstrip())

    def _send(self, answer: Answer) -> None:
        with self._sending, contextlib.suppress(OSError):  # rank 0 is gone: the reader notices
            try:
                self._connection.send(answer)
            except (pickle.PicklingError, TypeError, AttributeError, ValueError) as e:  # it cannot be pickled
                self._connection.send(Answer(answer.number, None, RolloutError(f"{answer.error or answer.value!r} ({e})")))


def relax_garbage_collector() -> None:
    """Make the collector run rarely: modules stay, and thousands of requests are many objects in which it finds nothing."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def serve(connection: Connection, make_engine: EngineFactory | None = None) -> None:
    """Be the rollout service of rank 0, which holds the other end of the connection.

    Args:
        connection: This process's end.
        make_engine: See `RolloutService`.
    """
    quiet_upstream()
    relax_garbage_collector()
    RolloutService(connection, make_engine).run()


if __name__ == "__main__":
    serve(Connection(int(os.environ[DESCRIPTOR])))
    os._exit(0)  # threads of a run that was cut off may still wait for servers
