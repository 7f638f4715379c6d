"""Traced steps on the ranks: every rank records its spans, and each writes them into the run's folder.

All ranks make the same calls. A step is traced if `logging.trace_every` says so, or if somebody asked for it with `tepo trace`.
Without either a step costs one comparison.

Calls of torch.distributed, ours and Megatron's, have spans, too. The functions of the module are replaced for the step and put
back after it, so that other steps do not pay for them. A call that returns before it is done (`async_op`, `isend`) has another
span for the time that its caller waits for it.

Modules that have imported a function by its name keep calling the original. In Megatron those are the gathers and
reduce-scatters of the distributed optimizer and of sequence parallelism; torch's profiler shows them. `isend` and `irecv` stay
as they are, because `dist.P2POp` compares them. On a GPU a span is the launch of a kernel, not its run.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tepo_megatron.actor.pipeline import traced_passes
from tepo_megatron.base.errors import StorageError
from tepo_megatron.base.save_requests import TraceRequest
from tepo_megatron.base.storage import replacing
from tepo_megatron.dist.objects import broadcast_result, same_error
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.monitor.trace_file import TracePart, profile_path, rank_name, write_part
from tepo_megatron.monitor.tracer import ROUND_TRIPS, SAME, ClockOffset, measure, tracer
from tepo_megatron.trainer.service_client import ServiceClient


def offset_to_rank_0(group: dist.ProcessGroup, clock: Callable[[], int]) -> ClockOffset:
    """Return the offset of this rank's clock against that of rank 0.

    Collectives: `ROUND_TRIPS` messages of 8 bytes in each direction between rank 0 and every other rank, one rank after the
    other. The first round trip of a rank waits for its turn, and the shortest one counts. `clock`: clock of this rank, in ns.
    """
    message = torch.zeros(1, dtype=torch.int64)
    if group.rank() == 0:
        for rank in range(1, group.size()):
            for _ in range(ROUND_TRIPS):
                dist.recv(message, group=group, group_src=rank)
                message[0] = clock()
                dist.send(message, group=group, group_dst=rank)
        return SAME

    def ask() -> int:
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        return int(message)

    return measure(ask, clock)


class StepTracer:
    """Traces steps, and has torch's profiler record them on one rank."""

    def __init__(self, service: ServiceClient | None, groups: ParallelDims, run_dir: Path, every: int) -> None:
        self._service, self._groups, self._run_dir, self._every = service, groups, run_dir, every
        self._asked: TraceRequest | None = None
        self._left = 0  # steps that the request still asks for

    def ask(self, request: TraceRequest | None) -> None:
        """Trace the next steps, too. None: nobody asked for them."""
        if request is not None:
            self._asked, self._left = request, request.steps

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace the block if the step is to be traced.

        Collectives if it is, at the end: those of `offset_to_rank_0`, a broadcast and an all-gather over the host group. Raises
        StorageError if a rank cannot write what it recorded, on every rank.
        """
        asked = self._left > 0
        if not asked and not (self._every and number % self._every == 0):
            yield
            return
        self._left -= asked
        profiled = asked and self._asked is not None and self._asked.profile == self._groups.rank
        profiler = _profiler(self._groups.device) if profiled else None
        self._call("begin")
        tracer.begin()
        try:
            recorders = traced_collectives(), traced_passes(self._groups.device), profiler or contextlib.nullcontext()
            with recorders[0], recorders[1], recorders[2], tracer.span(f"step {number}", "step"):
                yield
            self._write(number, profiler)
            self._call("end", number, self._groups.world_size, asked and not self._left)
        finally:
            tracer.discard()

    def _call(self, name: str, *args: object) -> None:
        """Make a call of `trace.ServiceTrace`, if this is rank 0."""
        if self._service is not None:
            self._service.call(f"trace.{name}", *args)

    def _service_offset(self) -> ClockOffset:
        """Return the offset of rank 0's clock against the service's, which answers `ping` with its time."""
        service = self._service
        return SAME if service is None else measure(lambda: int(service.call("ping")), tracer.clock)

    def _write(self, step: int, profiler: profile | None) -> None:
        host, rank, recording = self._groups.host, self._groups.rank, tracer.end()
        offset = offset_to_rank_0(host, tracer.clock) + broadcast_result(self._service_offset, host)
        with same_error(host, (OSError, RuntimeError), StorageError):
            write_part(self._run_dir, TracePart(rank_name(rank), 1 + rank, step, recording, offset))
            if profiler is not None:
                path = profile_path(self._run_dir, step, rank)
                with replacing(path, durable=False, temporary=path.with_name(f"unfinished-{path.name}")) as unfinished:
                    profiler.export_chrome_trace(str(unfinished))


def _profiler(device: torch.device) -> profile:
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True)


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
    def traced_call(*args: Any, **kwargs: Any) -> Any:  # this name is `hang_watchdog.TRACED`
        if getattr(inside, "call", False):
            return original(*args, **kwargs)
        inside.call = True
        try:
            with tracer.span(name, ROW, **_described((*args, *kwargs.values()))):
                return original(*args, **kwargs)
        finally:
            inside.call = False

    return traced_call


def _described(values: tuple[Any, ...]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            facts.setdefault("bytes", value.nbytes)
        elif isinstance(value, dist.ProcessGroup):
            facts |= {"group": value.group_desc, "ranks": value.size()}
    return facts
