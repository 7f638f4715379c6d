"""Timers around parts of a program, and PyTorch's profiler for what runs inside autograd's engine."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

Row = tuple[str, str]  # (pass, part)
MARK = "part: "  # prefix of our events in the profiler
BACKWARD, ENGINE, ACCUMULATION, UNKNOWN = "backward", "autograd's engine", "add to main_grad", "unknown"


class PartTimers:
    """Exclusive time and calls of each part, by the pass in which it ran. Time in nested parts counts for those only.

    Attributes:
        seconds: Exclusive seconds by (pass, part).
        calls: Number of calls by (pass, part).
        profiling: Whether parts also leave marks for PyTorch's profiler.
    """

    def __init__(self, first: str) -> None:
        """Start with no parts. `first` is the pass until another one is named."""
        self.seconds: defaultdict[Row, float] = defaultdict(float)
        self.calls: Counter[Row] = Counter()
        self.profiling = False
        self._open: list[tuple[Row, Any]] = []
        self._pass: str = first
        self._since = 0.0

    def start(self, part: str) -> None:
        """Begin a part inside the one that is open."""
        self._book()
        self.calls[self._pass, part] += 1
        mark = record_function(MARK + part) if self.profiling else None
        if mark:
            mark.__enter__()
        self._open.append(((self._pass, part), mark))

    def stop(self, *_: Any) -> None:
        """End the part that began last."""
        self._book()
        mark = self._open.pop()[1]
        if mark:
            mark.__exit__(None, None, None)

    def _book(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1][0]] += now - self._since
        self._since = now

    @contextmanager
    def inside(self, part: str, within: str | None = None) -> Iterator[None]:
        """Time the block as a part.

        Args:
            within: Pass that the part and all parts inside it belong to; None: the current one.
        """
        before, self._pass = self._pass, within or self._pass
        self.start(part)
        try:
            yield
        finally:
            self.stop()
            self._pass = before

    def timed(self, function: Callable[..., Any], part: str, within: str | None = None) -> Callable[..., Any]:
        """Return the function with every call timed."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.inside(part, within):
                return function(*args, **kwargs)

        return call

    def wrap(self, owner: Any, function: Callable[..., Any], part: str, within: str | None = None) -> None:
        """Time every call of a function of `owner`. The function is not given by its name, so that a type check finds it."""
        name = function.__name__
        assert getattr(owner, name) == function, f"{owner!r} has {function!r} under another name"
        setattr(owner, name, self.timed(function, part, within))

    def module(self, module: torch.nn.Module, part: str) -> None:
        """Time every forward of the module."""
        module.register_forward_pre_hook(lambda *_: self.start(part))
        module.register_forward_hook(self.stop)


def shares_of_backward(run: Callable[[], Any], timers: PartTimers) -> dict[str, float]:
    """Return the shares of the part BACKWARD in `run` that the operators of each part's backward take; they add up to 1.

    An operator and its backward share a sequence number; it belongs to the part in which the operator ran. ENGINE is the rest:
    autograd itself, and hooks.
    """
    timers.profiling = True
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        run()
    timers.profiling = False
    part_of: dict[int, str] = {}
    micros: Counter[str] = Counter()
    events = list(recorded.events() or ())
    for event in events:
        if event.sequence_nr >= 0 and not event.name.startswith("autograd::engine"):
            mark = event
            while mark is not None and not mark.name.startswith(MARK):
                mark = mark.cpu_parent
            if mark is not None and mark.name != MARK + BACKWARD:
                part_of[event.sequence_nr] = mark.name.removeprefix(MARK)
    whole = 0.0
    for event in events:
        if event.name.startswith("autograd::engine::evaluate_function"):
            accumulates = event.name.endswith("AccumulateGrad")
            micros[ACCUMULATION if accumulates else part_of.get(event.sequence_nr, UNKNOWN)] += event.cpu_time_total
        elif event.name == MARK + BACKWARD:
            whole += event.cpu_time_total
    shares = {part: time / whole for part, time in micros.items()}
    return shares | {ENGINE: 1 - sum(shares.values())}
