"""Reading and rearranging the next parameter while this one is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# Bytes of the next parameter up to which it is prepared beside this one: what that adds to the peak of memory.
_BYTES_AHEAD = 256 * 2**20


@dataclass(frozen=True)
class Job(Generic[T]):
    """make: what is to be done, in another thread. nbytes: of what it makes."""

    make: Callable[[], T]
    nbytes: int


def ahead(jobs: Iterable[Job[T]], limit: int = _BYTES_AHEAD) -> Iterator[T]:
    """What the jobs make, in order; each is begun while the caller works on the one before, if it is of at most `limit` bytes.

    One job runs at a time. An exception of a job is raised where its result would have come; later jobs are not begun.
    """
    queue = list(jobs)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        begun: Future[T] | None = None
        for i, job in enumerate(queue):
            made = (begun or thread.submit(job.make)).result()
            begun = None
            if i + 1 < len(queue) and queue[i + 1].nbytes <= limit:
                begun = thread.submit(queue[i + 1].make)
            yield made
            del made
