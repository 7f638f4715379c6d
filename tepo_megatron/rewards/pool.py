"""A pool of grading workers: child processes that may hang, exhaust memory or crash without harm to the run."""

import asyncio
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tepo_megatron.base.errors import RewardError
from tepo_megatron.base.memory_kills import MemoryKills
from tepo_megatron.config import RewardConfig
from tepo_megatron.rewards.process import REPLY_BYTES, Field, GradingWorker, WorkerBroken, WorkerOutcome

_log = logging.getLogger(__name__)
_MOST_REPORTED = 10  # lost workers that one pool reports
MEMORY_MIB = 1024  # address space of a worker
_START_ATTEMPTS = 3  # the kernel may have killed a starting worker for lack of memory
_BATCH_SECONDS = 0.01  # not a limit: of what a worker gets at once
_BATCH_REQUESTS = 64
_SLOW_SECONDS = 0.05  # not a limit: if a request takes longer, other workers may take those behind it


@dataclass(frozen=True)
class PoolLimits:
    """Limits of the grading workers.

    Attributes:
        soft_seconds: Processor time per request, after which the worker gives up by itself.
        hard_seconds: Wall time per request from its dispatch, after which the worker is killed and replaced.
    """

    workers: int
    soft_seconds: float
    hard_seconds: float
    memory_mib: int


def limits_of(cfg: RewardConfig) -> PoolLimits:
    """Return the limits that the config sets for the workers of one term."""
    return PoolLimits(cfg.workers, cfg.processor_seconds, cfg.timeout_seconds, MEMORY_MIB)


@dataclass(eq=False)
class _Request:
    """One request.

    Attributes:
        repeats_timeout: The grader ends by itself, so that a time-out is the machine's fault and is tried once more.
        repeated: A first worker was lost with the request.
        queued: The request is in the queue, and not only with a worker.
    """

    fields: Sequence[Field]
    outcome: "asyncio.Future[WorkerOutcome]"
    repeats_timeout: bool
    repeated: bool = False
    queued: bool = False


class GradingPool:
    """A queue of requests and the worker processes that grade them: a free worker takes the next requests.

    The workers start at once, but only requests wait for them. All coroutines must run in one event loop. A worker lives no
    longer than the thread that started it: the thread that builds the pool or, for replacements, that of the event loop.
    """

    def __init__(
        self,
        limits: PoolLimits,
        command: Sequence[str],
        check: str,
        tokenizer: str = "",
        reply_bytes: int = REPLY_BYTES,
    ) -> None:
        """Start the workers without waiting for them."""
        self._limits, self._command, self._check = limits, command, check
        self._tokenizer, self._reply_bytes = tokenizer, reply_bytes
        self._workers = [self._start() for _ in range(limits.workers)]
        self._serving: list[asyncio.Task[None]] = []  # one task per worker
        self._queue: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._open: set[asyncio.Future[WorkerOutcome]] = set()
        self._end: Exception | None = None  # raised by further requests
        self._kills, self._deaths = MemoryKills(), 0
        self._mean_seconds = _BATCH_SECONDS  # of the last requests, exponentially weighted
        self.cpu_seconds = 0.0

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    async def grade(self, requests: Iterable[Sequence[Field]]) -> list[WorkerOutcome]:
        """Return one outcome for each request, in order. Raises as `ask`."""
        return list(await asyncio.gather(*map(self.ask, requests)))

    def ask(self, fields: Sequence[Field], repeats_timeout: bool = False) -> "asyncio.Future[WorkerOutcome]":
        """Return the future outcome of a request, which comes in bounded time, whatever the texts do to the worker."""
        if self._end is not None:
            raise self._end
        self._serving = self._serving or [asyncio.create_task(self._serve(slot)) for slot in range(self._limits.workers)]
        request = _Request(fields, asyncio.get_running_loop().create_future(), repeats_timeout)
        self._open.add(request.outcome)
        request.outcome.add_done_callback(self._open.discard)
        self._enqueue([request], self._queue.append)
        return request.outcome

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._stop(ValueError("the grading pool is closed"))

    def _stop(self, why: Exception) -> None:
        self._end = self._end or why
        for outcome in list(self._open):
            if not outcome.done():
                outcome.set_exception(why)
                outcome.exception()  # whoever waited may have been cancelled, and then nobody retrieves it
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _start(self) -> GradingWorker:
        limits = self._limits
        try:
            return GradingWorker(self._command, limits.soft_seconds, limits.memory_mib, self._tokenizer, self._reply_bytes)
        except OSError as e:
            raise RewardError(f"cannot start a grading worker ({e}); lower reward.workers") from e

    async def _serve(self, slot: int) -> None:
        failed_starts = 0  # consecutive
        try:
            while self._end is None:
                worker = self._workers[slot]
                try:
                    await worker.wait_ready()
                    failed_starts = 0
                    await self._employ(worker)
                except (TimeoutError, WorkerBroken) as e:
                    failed_starts += 1
                    if isinstance(e, TimeoutError) or failed_starts == _START_ATTEMPTS:
                        raise self._no_start(worker, e) from None
                worker.kill()
                self._workers[slot] = self._start()
        except RewardError as e:
            self._stop(e)

    def _no_start(self, worker: GradingWorker, why: Exception) -> RewardError:
        fate = str(why) or "ended"
        return RewardError(
            f"a grading worker {fate} before its first answer; check {self._check} and that {self._limits.memory_mib} MiB "
            f"of memory are enough ({sys.executable}). Its last words:\n{worker.stderr_tail() or '(none)'}"
        )

    async def _employ(self, worker: GradingWorker) -> None:
        while True:
            batch = await self._take()
            try:
                if not worker.is_usable():  # it died between two batches, so no request was lost
                    return
                lost = await self._exchange(worker, batch)
                if lost is not None:
                    await self._settle_lost(worker, batch.popleft(), lost)
                    return
            finally:
                self._enqueue(reversed(batch), self._queue.appendleft)

    async def _take(self) -> deque[_Request]:
        """Wait for requests, and return as many of the next ones as a worker should get at once."""
        while True:
            while self._queue and self._queue[0].outcome.done():  # cancelled, or answered by a slow worker
                self._queue.popleft()
            if self._queue:
                break
            self._arrived.clear()
            await self._arrived.wait()
        share = math.ceil(len(self._queue) / len(self._workers))
        most = min(share, _BATCH_REQUESTS, int(_BATCH_SECONDS / self._mean_seconds))
        batch = deque(self._queue.popleft() for _ in range(max(1, most)))
        for request in batch:
            request.queued = False
        return batch

    def _enqueue(self, requests: Iterable[_Request], put: Callable[[_Request], None]) -> None:
        for request in requests:
            if not request.queued and not request.outcome.done():
                request.queued = True
                put(request)
        self._arrived.set()

    async def _exchange(self, worker: GradingWorker, batch: deque[_Request]) -> Exception | None:
        """Have the batch graded and remove what is done. Return why the worker was lost at the next request; else None."""
        try:
            worker.send([request.fields for request in batch])
            while batch:
                outcome = await self._reply(worker, batch)
                self.cpu_seconds += outcome.cpu_seconds
                self._mean_seconds += 0.1 * (outcome.cpu_seconds - self._mean_seconds)
                self._settle(batch.popleft(), outcome)
        except (TimeoutError, WorkerBroken) as e:
            return e
        return None

    async def _reply(self, worker: GradingWorker, batch: deque[_Request]) -> WorkerOutcome:
        """Return the outcome of the first request. If it takes long, offer those behind it to other workers, too."""
        now = time.monotonic()
        if len(batch) > 1:
            try:
                return await worker.receive(now + min(_SLOW_SECONDS, self._limits.hard_seconds))
            except TimeoutError:
                self._enqueue(reversed([*batch][1:]), self._queue.appendleft)
        return await worker.receive(now + self._limits.hard_seconds)

    async def _settle_lost(self, worker: GradingWorker, request: _Request, why: Exception) -> None:
        """Put a request back once whose worker was lost, or give it its status."""
        timeout = isinstance(why, TimeoutError)
        again = not request.repeated and (request.repeats_timeout or not timeout)
        if not timeout:
            await self._report(worker, again)
        if again:
            request.repeated = True
            self._enqueue([request], self._queue.appendleft)
        else:
            self._settle(request, WorkerOutcome("timeout" if timeout else "died"))

    def _settle(self, request: _Request, outcome: WorkerOutcome) -> None:
        if not request.outcome.done():
            request.outcome.set_result(outcome)

    async def _report(self, worker: GradingWorker, again: bool) -> None:
        """Warn about a worker that was lost with a request, for the first ten only: answers may kill workers on purpose."""
        self._deaths += 1
        if self._deaths > _MOST_REPORTED:
            return
        last = "; further ones are not reported" if self._deaths == _MOST_REPORTED else ""
        fate = await worker.exit_description()
        if fate.endswith("SIGKILL"):
            fate += f": {self._kills.explain('give the job more memory, or lower reward.workers')}"
        then = "its answer is graded again" if again else "so did another at the same answer, which counts as 0 (died)"
        _log.warning("grading worker %d %s; %s%s", worker.pid, fate, then, last)
