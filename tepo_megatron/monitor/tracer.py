"""Spans of one traced step, kept in the memory of each process until the step ends, and the wall time of every step by phase.

`trace_file.py` writes the spans. A process has one `tracer`. While it is not active, `span` returns a context that does
nothing.

    process   row in the trace        a span is
    rank      the thread's name       a step, a phase, a pass over a microbatch, a part of a weight update
              collectives             a call of torch.distributed
    service   the thread's name       a phase of sampling and grading
              calls of rank 0         a call over the service's connection
              requests, grading       a request for a group of samples; the grading of a group
    server    requests, weights       a request, with prefill and decode; a call of a weight update

Spans of one thread are nested. Those of an event loop are not, so they have a `unit`: spans of one unit are nested, and the
units of a row that overlap are drawn below each other.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

from tepo_megatron.monitor.hang_watchdog import progress

MOST_SPANS = 500_000  # of a process and step; about 200 bytes each
ROUND_TRIPS = 8


class ClockOffset(NamedTuple):
    """Offset of a clock against a reference: reference = clock + `ns`, off by at most `uncertainty_ns`.

    It comes from round trips over a connection (as NTP does, RFC 5905). Processes of one machine usually share the clock; those
    of several machines do not, and neither do some containers.
    """

    ns: int
    uncertainty_ns: int

    def __add__(self, other: object) -> "ClockOffset":
        """Return the offset against the reference of `other`, which is the offset of this one's reference."""
        if not isinstance(other, ClockOffset):
            return NotImplemented
        return ClockOffset(self.ns + other.ns, self.uncertainty_ns + other.uncertainty_ns)


SAME = ClockOffset(0, 0)  # of the reference itself


def best_offset(round_trips: Iterable[tuple[int, int, int]]) -> ClockOffset:
    """Return the offset that the shortest round trip shows."""
    sent, reference, received = min(round_trips, key=lambda trip: trip[2] - trip[0])
    return ClockOffset(reference - (sent + received) // 2, (received - sent + 1) // 2)


def measure(ask: Callable[[], int], clock: Callable[[], int], round_trips: int = ROUND_TRIPS) -> ClockOffset:
    """Return the offset of a clock."""
    return best_offset([(clock(), ask(), clock()) for _ in range(round_trips)])


@dataclass(slots=True)
class Span:
    """One span. Times are nanoseconds on the monotonic clock of the process that recorded it."""

    name: str
    row: str
    start: int
    end: int | None
    args: dict[str, Any] = field(default_factory=dict)  # further values to show, as plain JSON
    process: str = ""
    unit: int | None = None  # number of its unit; see above. None: spans of this row are nested anyway.
    # Keys of the chains that it belongs to. An arrow leads from each span of a chain to the next one.
    flows: tuple[str, ...] = ()


@dataclass
class Recording:
    """The spans of a step, as one process recorded them."""

    begun: int
    ended: int
    spans: list[Span]
    dropped: int = 0


class _OpenSpan:
    __slots__ = ("_kept", "_tracer", "span")

    def __init__(self, tracer: "Tracer", span: Span) -> None:
        self._tracer, self.span, self._kept = tracer, span, tracer.open_spans

    def __enter__(self) -> None:
        self.span.start = self._tracer.clock()
        self._kept[id(self)] = self.span

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._kept.pop(id(self), None) is not None and self._kept is self._tracer.open_spans:
            self.span.end = self._tracer.clock()
            self._tracer.keep(self.span)


_NOTHING = contextlib.nullcontext()


class Tracer:
    """Records spans while it is active. Any thread may call every method but `begin`, `end` and `discard`."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, most: int = MOST_SPANS) -> None:
        self.clock, self._most = clock, most
        self.active = False
        self.open_spans: dict[int, Span] = {}
        self._spans: list[Span] = []
        self._begun = self._dropped = 0
        self._units = itertools.count(1)

    def begin(self) -> None:
        """Begin to record a step. What was recorded before and not taken by `end` is forgotten."""
        self._spans, self.open_spans, self._dropped = [], {}, 0
        self._begun, self.active = self.clock(), True

    def end(self) -> Recording:
        self.active, ended = False, self.clock()
        unfinished, self.open_spans = list(self.open_spans.values()), {}
        for span in unfinished:
            span.end, span.args = ended, {**span.args, "unfinished": True}
        spans, self._spans = self._spans, []
        return Recording(self._begun, ended, [*spans, *unfinished], self._dropped)

    def discard(self) -> None:
        """Stop, and forget what was recorded."""
        self.active, self._spans, self.open_spans = False, [], {}

    def unit(self) -> int:
        """Return the number of a new unit of spans."""
        return next(self._units)

    def span(
        self, name: str, row: str = "", *, process: str = "", flows: Sequence[object] = (), **args: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context whose block is recorded as a span."""
        if not self.active:
            return _NOTHING
        row = row or threading.current_thread().name.replace("MainThread", "main thread")
        return _OpenSpan(self, Span(name, row, 0, None, args, process, None, tuple(map(str, flows))))

    def add(
        self,
        name: str,
        row: str,
        start: int,
        end: int | None,
        *,
        process: str = "",
        unit: int | None = None,
        flows: Sequence[object] = (),
        **args: Any,
    ) -> None:
        """Record a span whose times are known. It does nothing while no step is traced."""
        if self.active:
            self.keep(Span(name, row, start, end, args, process, unit, tuple(map(str, flows))))

    def instant(self, name: str, row: str, *, process: str = "", **args: Any) -> None:
        """Record that something happened now. It does nothing while no step is traced."""
        if self.active:
            self.keep(Span(name, row, self.clock(), None, args, process))

    def keep(self, span: Span) -> None:
        """Keep a complete span, unless there are too many."""
        if len(self._spans) < self._most:
            self._spans.append(span)
        else:
            self._dropped += 1


tracer = Tracer()


class Clock:
    """Sums of wall time by phase name.

    On a GPU a phase ends when its kernels have been launched, not when they have finished. Every phase of the training loop
    ends with a value read on the host, which waits for the kernels.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as phase `name`. Repeated blocks add up."""
        start = time.perf_counter()
        try:
            with progress.within(name), tracer.span(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block from the total."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - start

    @property
    def total(self) -> float:
        """Return the seconds since the clock was created, without paused blocks."""
        return time.perf_counter() - self._start
