"""The rollout service: a process next to rank 0 that owns prompts, engine, servers, graders, record and log of a run.

The launcher starts it, and rank 0 is its only client (`trainer/service_client.py`). They exchange pickled messages over a
socket pair, which has no address, so that no other process can connect. It ends with its rank 0, and with the launcher.

Where the ranks are restarted after a failure, the service lives on and serves one rank 0 after the other. It goes on with its
work while there is none, and keeps each batch until a checkpoint contains its step.

    thread    does
    reader    receives calls, and answers `ping` at once with its time
    main      makes the calls in their order; starts the servers, which would end with another thread
    rollout   samples, grades and evaluates
    waiters   wait for what the rollout thread does
"""

import contextlib
import gc
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tepo_megatron.base.errors import RolloutError, StorageError, TepoError
from tepo_megatron.base.processes import quiet_upstream
from tepo_megatron.base.save_requests import LOOK_SECONDS, STOP, asked, take_save
from tepo_megatron.base.storage import disk_fault
from tepo_megatron.config import CheckpointConfig, Config
from tepo_megatron.config.io import plain
from tepo_megatron.engines.engine import INITIAL_VERSION
from tepo_megatron.monitor.tracer import tracer
from tepo_megatron.service.batch_memory import BatchHeader
from tepo_megatron.service.main_driver import MainDriver
from tepo_megatron.service.messages import CONTROL, Answer, Call, KeptRollouts, Waited
from tepo_megatron.service.opening import EngineFactory, open_driver

POLL_SECONDS = 0.05


class _Received(NamedTuple):
    call: Call
    connection: Connection


class _Left(NamedTuple):
    pass


@dataclass
class _Task:
    future: Future[Any]
    minibatches: list[BatchHeader] = field(default_factory=list)
    received: int = 0


class _End(NamedTuple):
    pass


class RolloutService:
    """Makes the calls of rank 0 on the driver of the run, on its engine, or on itself."""

    def __init__(self, connections: Iterable[Connection], make_engine: EngineFactory | None) -> None:
        self._connections, self._make_engine = connections, make_engine
        self._keeps = False  # whether it outlives its rank 0
        self._connection: Connection | None = None  # of the present rank 0
        self._sending = threading.Lock()
        self._calls: queue.SimpleQueue[_Received | _Left | _End] = queue.SimpleQueue()
        self._cfg: Config | None = None
        self._driver: MainDriver | None = None
        self._saved_at = 0.0  # `time.monotonic()` of the start, or of the last checkpoint that was asked for
        self._tasks: dict[int, _Task] = {}  # by number of the call of the present rank 0 that started it
        self._batches: dict[int, _Task] = {}  # step -> its rollouts, which are kept
        # one thread for all work, because the graders that a thread starts are ended when the thread ends
        self._rollout = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._waiters = ThreadPoolExecutor(thread_name_prefix="waiter")

    def run(self) -> None:
        """Make calls until the last rank 0 closes its connection or `end` is called; then end the engine."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        with contextlib.ExitStack() as stack:
            while not isinstance(item := self._calls.get(), _End):
                if isinstance(item, _Left):
                    self._left()
                else:
                    with tracer.span(item.call.name, "calls of rank 0"):
                        self._answer(item, partial(self._make, item.call, stack))

    def end(self) -> None:
        """Have `run` return once the call in progress has been made. May be called by a signal handler."""
        self._calls.put(_End())

    def _read(self) -> None:
        for connection in self._connections:
            self._connection = connection
            with contextlib.suppress(EOFError, OSError):
                while True:
                    received = _Received(connection.recv(), connection)
                    name, args = received.call.name, received.call.args
                    if name == "ping":
                        self._send(connection, Answer(received.call.number, tracer.clock(), None))
                    elif name == "wait":
                        self._waiters.submit(self._answer, received, partial(self._wait, connection, *args))
                    else:
                        self._calls.put(received)
            connection.close()
            if not self._keeps:
                break
            self._calls.put(_Left())
        self._calls.put(_End())

    def _left(self) -> None:
        """Go on without rank 0, which was killed or has failed. Its successor begins with the call `open`."""
        self._tasks = {}
        if self._driver is not None:
            self._driver.trace.lost()
            if self._driver.engine is not None:
                self._driver.engine.abandon_update()

    def _open(self, stack: contextlib.ExitStack, cfg: Config) -> None:
        if self._driver is not None:
            self._driver.reopen(plain(cfg))
        else:
            self._saved_at = time.monotonic()
            self._driver = stack.enter_context(open_driver(cfg, self._make_engine))
            if cfg.restarts_ranks:
                self._keeps = self._driver.kept.keeps_batches = True
        self._cfg = cfg

    def _make(self, call: Call, stack: contextlib.ExitStack) -> Any:
        """Make one call and return its result; a future is answered once it is done. The driver is open within the stack."""
        name, args = call.name, call.args
        match name:
            case "open":
                self._open(stack, *args)
            case "close":
                stack.close()
                self.end()
            case "collect":
                self._tasks[call.number] = self._collect(*args)
            case "evaluate":
                self._tasks[call.number] = _Task(self._rollout.submit(self._started.evaluate, *args))
            case "done":
                return self._tasks[args[0]].future.done()
            case "saved":
                self._saved(*args)
            case "sleep_engine":
                self._finish_sampling()
                self._started.sleep_engine()
            case "resume":
                return self._resume(*args)
            case _:
                owner, _, attribute = name.rpartition(".")
                target = getattr(getattr(self._started, owner) if owner else self._started, attribute)
                return target(*args) if callable(target) else target
        return None

    @property
    def _started(self) -> MainDriver:
        assert self._driver is not None, "the first call is open"
        return self._driver

    def _collect(self, step: int) -> _Task:
        if step in self._batches:
            self._started.kept.repeat_line(step)
            return replace(self._batches[step], received=0)
        minibatches: list[BatchHeader] = []
        task = _Task(self._rollout.submit(partial(self._started.collect, step, minibatches.append)), minibatches)
        if self._keeps:
            self._batches[step] = task
        return task

    def _saved(self, step: int) -> None:
        if self._keeps:
            self._batches = {number: task for number, task in self._batches.items() if number > step}
            self._started.kept.release_until(step)

    def _finish_sampling(self) -> None:
        """Wait until nothing is sampled for a former rank 0, or what is left needs weights."""
        engine = self._started.engine
        while not all(task.future.done() for task in self._batches.values()):
            if engine is None or engine.asleep or engine.needs_weights:
                return
            time.sleep(POLL_SECONDS)

    def _resume(self, state: Mapping[str, Any] | None, passed_over: Sequence[str]) -> KeptRollouts | None:
        """Restore the state of a checkpoint. Return what is kept beyond it; None if nothing is, in a new service."""
        driver, step = self._started, 0 if state is None else state["step"]
        if not driver.reopened:
            driver.resume(state, passed_over)
            return None
        kept = sorted(number for number in self._batches if number > step)
        if kept != list(range(step + 1, step + 1 + len(kept))) or step < driver.kept.released_until:
            raise LookupError(f"the rollouts of step {step + 1} were released with a later checkpoint")
        self._saved(step)
        driver.resume(state, passed_over)
        version = INITIAL_VERSION if driver.engine is None else driver.engine.version
        return KeptRollouts(None if version == INITIAL_VERSION else version, max(kept, default=step))

    def _wait(self, connection: Connection, number: int, may_stop: bool) -> Waited:
        """Wait for a task, for one of its minibatches, or for what the ranks have to do meanwhile."""
        assert self._cfg is not None
        engine, task, trains = self._started.engine, self._tasks[number], not self._cfg.rollout.only
        look = 0.0
        while connection is self._connection and not connection.closed:
            done = task.future.done()
            if trains and may_stop and (time.monotonic() >= look or done):
                look = time.monotonic() + LOOK_SECONDS
                if asked(self._cfg.run_dir, STOP):
                    return Waited("stop")
            if task.received < len(task.minibatches):
                task.received += 1
                return Waited("minibatch", task.minibatches[task.received - 1])
            if done:
                cfg, trace = self._cfg, self._started.trace.take_request()
                save = trains and self._save_is_due(cfg.checkpoint, cfg.run_dir)
                return Waited("done", self._tasks.pop(number).future.result(0), save=save, trace=trace)
            if engine is not None and trains and engine.needs_weights:
                return Waited("weights")
            time.sleep(POLL_SECONDS)
        return Waited("stop")  # nobody hears it

    def _save_is_due(self, cfg: CheckpointConfig, run_dir: Path) -> bool:
        """Return whether the step is to be followed by a checkpoint because someone asks for it, or by time."""
        due = take_save(run_dir) or cfg.is_due(time.monotonic() - self._saved_at)
        if due:
            self._saved_at = time.monotonic()
        return due

    def _answer(self, received: _Received, make: Callable[[], Any]) -> None:
        number, connection = received.call.number, received.connection
        try:
            result = make()
        except Exception as e:
            self._send(connection, Answer(number, None, self._error(e)))
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._answer(received, done.result))
        else:
            self._send(connection, Answer(number, result, None))

    def _error(self, e: Exception) -> Exception:
        """Return the error as rank 0 raises it: our own in its class of `base/errors.py`, any other as its traceback.

        A subclass may lie in a module that no rank imports, and may not survive pickling.
        """
        if isinstance(e, TepoError):
            return next(kind for kind in type(e).__mro__ if kind.__module__ == TepoError.__module__)(str(e))
        fault = None if self._cfg is None else disk_fault(e, self._cfg.run_dir, written=False)
        return StorageError(fault) if fault is not None else RuntimeError("".join(traceback.format_exception(e)).rstrip())

    def _send(self, connection: Connection, answer: Answer) -> None:
        with self._sending, contextlib.suppress(OSError):  # rank 0 is gone: the reader notices
            try:
                connection.send(answer)
            except (pickle.PicklingError, TypeError, AttributeError, ValueError) as e:  # it cannot be pickled
                connection.send(Answer(answer.number, None, RolloutError(f"{answer.error or answer.value!r} ({e})")))


def relax_garbage_collector() -> None:
    """Make the collector run rarely: modules stay, and thousands of requests are many objects in which it finds nothing."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def serve(control: socket.socket, make_engine: EngineFactory | None = None) -> None:
    """Be the rollout service of each rank 0 whose connection comes over `control`, until SIGTERM or the call `close`."""
    quiet_upstream()
    relax_garbage_collector()
    service = RolloutService(_received(control), make_engine)
    signal.signal(signal.SIGTERM, lambda *_: service.end())
    service.run()


def _received(control: socket.socket) -> Iterator[Connection]:
    """Yield the connections that the launcher sends, until it closes its end."""
    while files := socket.recv_fds(control, 1, 1)[1]:
        yield Connection(files[0])


def main(make_engine: EngineFactory | None = None) -> NoReturn:
    """Be the service that the launcher has started."""
    serve(socket.socket(fileno=int(os.environ.pop(CONTROL))), make_engine)
    os._exit(0)  # threads of a run that was cut off may still wait for servers


if __name__ == "__main__":
    main()
