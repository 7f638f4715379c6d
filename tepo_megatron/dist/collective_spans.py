"""Spans of the calls of torch.distributed, ours and Megatron's, while a step is traced.

The functions of the module are replaced for the step and put back after it, so that other steps do not pay for them. A call
that returns before it is done (`async_op`, `isend`) has another span for the time that its caller waits for it.

Modules that have imported a function by its name keep calling the original. In Megatron those are the gathers and
reduce-scatters of the distributed optimizer and of sequence parallelism; torch's profiler shows them. `isend` and `irecv` stay
as they are, because `dist.P2POp` compares them. On a GPU a span is the launch of a kernel, not its run.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tepo_megatron.monitor.tracer import tracer

ROW = "collectives"
WAIT = "wait"
NAMES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "recv", "reduce",
    "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


@contextlib.contextmanager
def traced_collectives() -> Iterator[None]:
    """Record each call of torch.distributed inside the block as a span; calls that it makes itself have none."""
    originals = [(dist, name, getattr(dist, name)) for name in NAMES] + [(dist.Work, WAIT, dist.Work.wait)]
    inside = threading.local()
    for owner, name, original in originals:
        setattr(owner, name, _traced(name, original, inside))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _traced(name: str, original: Callable[..., Any], inside: threading.local) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "call", False):
            return original(*args, **kwargs)
        inside.call = True
        try:
            with tracer.span(name, ROW, **_described((*args, *kwargs.values()))):
                return original(*args, **kwargs)
        finally:
            inside.call = False

    return call


def _described(values: tuple[Any, ...]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            facts.setdefault("bytes", value.nbytes)
        elif isinstance(value, dist.ProcessGroup):
            facts |= {"group": value.group_desc, "ranks": value.size()}
    return facts
