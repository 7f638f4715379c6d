"""Spans of the passes over microbatches, while a step is traced.

The forward passes and the loss are called by our code (`pipeline.py`). The backward passes are called by Megatron's schedules,
whose function for one of them is replaced for the step. On a GPU these spans are the time in which the host launches kernels.
Pairs of CUDA events then show in a row of their own when the kernels ran.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from tepo_megatron.monitor.hang_watchdog import progress
from tepo_megatron.monitor.tracer import tracer

DEVICE_ROW = "GPU"


class DeviceSpans:
    """Pairs of CUDA events around passes. On a CPU it records nothing."""

    def __init__(self, device: torch.device) -> None:
        self._pairs: list[tuple[str, dict[str, Any], torch.cuda.Event, torch.cuda.Event]] = []
        self._zero, self._start = self._now() if device.type == "cuda" else None, tracer.clock()

    def _now(self) -> torch.cuda.Event:
        torch.cuda.synchronize()
        return self._record()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def around(self, name: str, **args: Any) -> Iterator[None]:
        """Record the kernels that the block launches as one span."""
        if self._zero is None:
            yield
            return
        begun = self._record()
        yield
        self._pairs.append((name, args, begun, self._record()))

    def finish(self) -> None:
        """Wait for the kernels, and add the spans to the trace."""
        if self._zero is None:
            return
        torch.cuda.synchronize()
        for name, args, begun, ended in self._pairs:
            start, end = (self._start + int(1e6 * self._zero.elapsed_time(event)) for event in (begun, ended))
            tracer.add(name, DEVICE_ROW, start, max(start, end), **args)


_device: list[DeviceSpans] = []  # of the traced step; empty without one


@contextlib.contextmanager
def pass_span(name: str, **args: Any) -> Iterator[None]:
    """Record the block as a pass of the traced step."""
    with tracer.span(name, **args), _device[0].around(name, **args) if _device else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def traced_passes(device: torch.device) -> Iterator[None]:
    """Record the backward passes inside the block, and the kernels of all passes.

    Backward passes are numbered in their order. Without virtual pipeline stages that is the order of the forward passes.
    """
    original = schedules.backward_step

    @functools.wraps(original)
    def backward_step(*args: Any, **kwargs: Any) -> Any:
        progress.backward += 1
        with pass_span("backward", microbatch=progress.backward):
            return original(*args, **kwargs)

    schedules.backward_step = backward_step
    _device.append(DeviceSpans(device))
    try:
        yield
        _device[0].finish()
    finally:
        _device.clear()
        schedules.backward_step = original
