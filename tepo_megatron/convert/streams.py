"""Convert parameters in a few threads, each of which reads, checks and writes its own.

Most of a conversion is work of the kernel (it maps pages that are read, and allocates and fills pages that are written), and
the kernel serializes writes to one file. So each thread does all steps for its parameters, and writes to files of its own.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

# A constant, not the number of cores, because the output must not depend on the machine.
STREAMS = 2
# Of parameters larger than this (bytes), one is in memory at a time. What smaller ones add to the peak is bounded.
LARGE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class CopyJob:
    """The conversion of one parameter.

    Attributes:
        nbytes: size of the parameter that is in memory meanwhile.
    """

    run: Callable[[], object]
    nbytes: int = 0


def run_queues(queues: Sequence[Sequence[CopyJob]], large_bytes: int = LARGE_BYTES) -> None:
    """Run all jobs. The jobs of a queue run in order in one thread; STREAMS queues run at a time, and start in their order.

    A job that is larger than `large_bytes` runs concurrently with no other such job. After an exception, or an interrupt, each
    thread ends before its next job. Jobs see the caller's context variables, and PyTorch computes each job in its own thread
    only.

    Raises:
        BaseException: the first exception of a job, once all threads have ended.
    """
    stop, large = threading.Event(), threading.Lock()
    failures: list[BaseException] = []

    def run(queue: Sequence[CopyJob]) -> None:
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


def balance(sizes: Sequence[int], shares: int = STREAMS) -> list[list[int]]:
    """Distribute items over `shares`, so that the sums of their sizes are about equal. The largest items are distributed first.

    Returns:
        For each share the indices of its items, in ascending order.
    """
    dealt: list[list[int]] = [[] for _ in range(shares)]
    sums = [0] * shares
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        share = sums.index(min(sums))
        dealt[share].append(i)
        sums[share] += sizes[i]
    return [sorted(share) for share in dealt]


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limit PyTorch to one thread within the block: more would only take cores from the streams."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
