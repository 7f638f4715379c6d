"""Timers around parts of a program, and PyTorch's profiler for what runs in autograd's engine."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

Row = tuple[str, str]  # (pass, part)
MARK = "part: "  # of the profiler's events that are ours
BACKWARD, ENGINE, ACCUMULATION, UNKNOWN = "backward", "autograd's engine", "add to main_grad", "unknown"


class Timers:
    """Own time and calls of each part, by the pass in which they ran; a part's own time is without that of parts inside it.

    first: the pass until another one is named. profiling: parts leave marks for PyTorch's profiler too.
    """

    def __init__(self, first: str) -> None:
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
        """The block is a part; within: the pass that it and all parts inside it belong to."""
        before, self._pass = self._pass, within or self._pass
        self.start(part)
        try:
            yield
        finally:
            self.stop()
            self._pass = before

    def wrap(self, owner: Any, name: str, part: str, within: str | None = None) -> None:
        """Time every call of `owner.name`."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.inside(part, within):
                return original(*args, **kwargs)

        setattr(owner, name, timed)

    def module(self, module: torch.nn.Module, part: str) -> None:
        """Time every forward of the module."""
        module.register_forward_pre_hook(lambda *_: self.start(part))
        module.register_forward_hook(self.stop)


def shares_of_backward(run: Callable[[], Any], timers: Timers) -> dict[str, float]:
    """Of the part BACKWARD in `run`, how much the operators of each part's backward take; adds up to 1.

    An operator and its backward share a sequence number: the part is the one in which the operator ran. ENGINE is the rest:
    what autograd itself takes, and hooks.
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
