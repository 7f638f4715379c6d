"""A pool of grading workers: child processes that may hang, exhaust memory or crash without harm to the run."""

import logging
import selectors
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tepo_megatron.config import RewardConfig
from tepo_megatron.errors import RewardError
from tepo_megatron.rewards.process import START_SECONDS, GradingWorker, WorkerBroken, WorkerOutcome
from tepo_megatron.utils.memory_kills import MemoryKills

_log = logging.getLogger(__name__)
_MOST_REPORTED = 10  # lost workers that one pool reports
MEMORY_MIB = 1024  # address space of a worker
_START_ATTEMPTS = 3  # the kernel may have killed a starting worker for lack of memory


@dataclass(frozen=True)
class PoolLimits:
    """Limits of the grading workers.

    Attributes:
        workers: Number of processes.
        soft_seconds: Processor time per request, after which the worker gives up by itself.
        hard_seconds: Wall time per request from its dispatch, after which the worker is killed and replaced.
        memory_mib: Address space of a worker, in MiB.
    """

    workers: int
    soft_seconds: float
    hard_seconds: float
    memory_mib: int


def limits_of(cfg: RewardConfig) -> PoolLimits:
    """Return the limits that the config sets for the workers of one term."""
    return PoolLimits(cfg.workers, cfg.processor_seconds, cfg.timeout_seconds, MEMORY_MIB)


class GradingPool:
    """Grades requests in worker processes. They start at once, but only `grade` waits for them.

    Not thread-safe. A worker lives no longer than the thread that started it: the thread that builds the pool or, for
    replacements, the thread that grades.
    """

    def __init__(self, limits: PoolLimits, command: Sequence[str], check: str) -> None:
        """Start the workers without waiting for them.

        Args:
            limits: Limits of the workers.
            command: Grader of `grading/worker.py` and its arguments.
            check: The thing to check if a worker does not start, for the error message.

        Raises:
            RewardError: The system cannot create a process.
        """
        self._limits, self._command, self._check = limits, command, check
        self._workers = [self._start() for _ in range(limits.workers)]
        self._failed_starts = 0  # consecutive
        self._repeat_next: list[int] = []  # requests whose workers died
        self._repeated: set[int] = set()  # requests dispatched a second time
        self._closed = False
        self._kills, self._deaths = MemoryKills(), 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def grade(self, requests: Sequence[Sequence[str]]) -> list[WorkerOutcome]:
        """Return one outcome for each request, in order, whatever the texts do to their workers.

        A request whose worker dies is given to another worker once, since the first may have been killed for an unrelated
        reason. Takes at most about len(requests) / workers * hard_seconds.

        Raises:
            RewardError: A worker cannot start.
            ValueError: The pool is closed.
        """
        if self._closed:
            raise ValueError("the grading pool is closed")
        todo = deque(enumerate(requests))
        outcomes: dict[int, WorkerOutcome] = {}
        self._repeated = set()
        try:
            while len(outcomes) < len(requests):
                todo.extendleft((task, requests[task]) for task in self._repeat_next)
                self._repeated.update(self._repeat_next)
                self._repeat_next = []
                self._dispatch(todo, outcomes)
                self._collect(outcomes)
        except BaseException:
            # a reply still in flight would be taken for one of the next batch
            self.close()
            raise
        return [outcomes[task] for task in range(len(requests))]

    def close(self) -> None:
        """Kill the workers. A second call does nothing."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _start(self) -> GradingWorker:
        try:
            return GradingWorker(self._command, self._limits.soft_seconds, self._limits.memory_mib)
        except OSError as e:
            raise RewardError(f"cannot start a grading worker ({e}); lower reward.workers") from e

    def _replace(self, worker: GradingWorker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = self._start()

    def _dispatch(self, todo: deque[tuple[int, Sequence[str]]], outcomes: dict[int, WorkerOutcome]) -> None:
        """Send each idle worker the next request."""
        for worker in [w for w in self._workers if w.idle]:
            if not todo:
                return
            if not worker.is_alive():  # it died between two batches, so no request was lost
                self._replace(worker)
                continue
            task, texts = todo.popleft()
            try:
                worker.send(task, texts, self._limits.hard_seconds)
            except WorkerBroken:
                self._settle(worker, "died", outcomes)

    def _collect(self, outcomes: dict[int, WorkerOutcome]) -> None:
        """Wait until a worker replies, dies, accepts more of its request, or is overdue; handle all such workers."""
        waiting = [w for w in self._workers if not w.idle]
        if not waiting:
            return
        patience = min(w.deadline for w in waiting) - time.monotonic()
        with selectors.DefaultSelector() as selector:
            for worker in waiting:
                selector.register(worker.replies, selectors.EVENT_READ)
                if worker.sending:
                    selector.register(worker.requests, selectors.EVENT_WRITE)
            possible = {key.fd for key, _ in selector.select(max(0.0, patience))}
        for worker in waiting:
            try:
                if worker.requests in possible:
                    worker.continue_send()
                if worker.replies in possible:
                    self._read(worker, outcomes)
                elif time.monotonic() >= worker.deadline:
                    self._settle(worker, "timeout", outcomes)
            except WorkerBroken:
                self._settle(worker, "died", outcomes)

    def _read(self, worker: GradingWorker, outcomes: dict[int, WorkerOutcome]) -> None:
        outcome = worker.receive()
        if outcome is not None:
            assert worker.task is not None
            outcomes[worker.task], worker.task = outcome, None
        elif worker.idle:
            self._failed_starts = 0
        elif time.monotonic() >= worker.deadline:  # a reply that never ends
            self._settle(worker, "timeout", outcomes)

    def _settle(self, worker: GradingWorker, status: Literal["timeout", "died"], outcomes: dict[int, WorkerOutcome]) -> None:
        """Record the outcome of a worker that will not reply, or schedule its request again, and replace the worker.

        Raises RewardError if starting the worker again would be useless.
        """
        if worker.task is not None and status == "died":
            self._report(worker, again=worker.task not in self._repeated)
        if worker.task is not None and status == "died" and worker.task not in self._repeated:
            self._repeat_next.append(worker.task)
        elif worker.task is not None:
            outcomes[worker.task] = WorkerOutcome(status)
        elif status == "timeout" or self._failed_starts == _START_ATTEMPTS - 1:
            fate = "ended" if status == "died" else f"was not ready after {START_SECONDS:.0f} s"
            raise RewardError(
                f"a grading worker {fate} before its first answer; check {self._check} and that {self._limits.memory_mib} MiB "
                f"of memory are enough ({sys.executable}). Its last words:\n{worker.stderr_tail() or '(none)'}"
            )
        else:
            self._failed_starts += 1
        self._replace(worker)

    def _report(self, worker: GradingWorker, again: bool) -> None:
        """Warn about a worker that was lost with a request, for the first ten only: answers may kill workers on purpose."""
        self._deaths += 1
        if self._deaths > _MOST_REPORTED:
            return
        fate = worker.exit_description()
        if fate.endswith("SIGKILL"):
            fate += f": {self._kills.explain('give the job more memory, or lower reward.workers')}"
        then = "its answer is graded again" if again else "so did another at the same answer, which counts as 0 (died)"
        last = "; further ones are not reported" if self._deaths == _MOST_REPORTED else ""
        _log.warning("grading worker %d %s; %s%s", worker.pid, fate, then, last)
