"""Converting parameters in a few threads, each of which reads, checks and writes its own.

Most of a conversion is the kernel's work (mapping pages that are read, taking and filling pages that are written), and there
writes to one file take turns. So each thread does all of it for its parameters, into files of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

# Not the number of cores: the output must not depend on the machine.
STREAMS = 2
# Bytes of a parameter above which it is in memory alone, but for smaller ones: what these add to the peak is bounded.
LARGE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Job:
    """run: what is to be done. nbytes: of the parameter that is in memory meanwhile."""

    run: Callable[[], object]
    nbytes: int = 0


def work(queues: Sequence[Sequence[Job]], large_bytes: int = LARGE_BYTES) -> None:
    """Run all jobs: those of a queue one after the other in one thread, STREAMS queues at a time, begun in their order.

    Of the jobs of more than `large_bytes` one runs at a time. The first exception of a job is raised here once all threads have
    ended, which they do before their next job, as on an interrupt. Jobs see the caller's context variables, and PyTorch
    computes each in its own thread only.
    """
    stop, large = threading.Event(), threading.Lock()
    failures: list[BaseException] = []

    def run(queue: Sequence[Job]) -> None:
        for job in queue:
            with large if job.nbytes > large_bytes else contextlib.nullcontext():
                if stop.is_set():
                    return
                try:
                    job.run()
                except BaseException as e:
                    failures.append(e)
                    stop.set()

    with _one_thread_each(), ThreadPoolExecutor(STREAMS, thread_name_prefix="convert") as pool:
        try:
            wait([pool.submit(contextvars.copy_context().run, run, queue) for queue in queues])
        finally:
            stop.set()
    if failures:
        raise failures[0]


def deal(sizes: Sequence[int], hands: int = STREAMS) -> list[list[int]]:
    """Indices of `sizes`, ascending in each hand; the sums of the hands are about equal (the largest are dealt first)."""
    dealt: list[list[int]] = [[] for _ in range(hands)]
    sums = [0] * hands
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        hand = sums.index(min(sums))
        dealt[hand].append(i)
        sums[hand] += sizes[i]
    return [sorted(hand) for hand in dealt]


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """PyTorch's own threads would only take the cores from the streams."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
