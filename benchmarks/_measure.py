"""Measuring tools: interleaved times, memory as PyTorch's allocator sees it, bytes moved, collectives counted."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

# Tensors up to this size are assumed to stay in a CPU's last-level cache between operators.
CACHE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds over the repetitions."""

    wall: float
    low: float  # 20th percentile of the wall-clock time
    high: float  # 80th percentile of the wall-clock time
    # Median CPU time of the process, all threads together. With one thread it is the steadier figure on a busy machine;
    # spinning threads count too.
    cpu: float


Call = Callable[[Any], Any]  # an alternative; its argument is what `prepare` made


def on_host(call: Call, given: Any) -> tuple[float, float]:
    """Return the wall-clock seconds and the CPU seconds of this process for one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    out = call(given)
    took = (time.perf_counter() - wall, time.process_time() - cpu)
    del out
    return took


def interleaved(
    prepare: Callable[[], Any],
    alternatives: Mapping[str, Call],
    repetitions: int,
    timed: Callable[[Call, Any], tuple[float, float]] = on_host,
) -> dict[str, MeasuredTimes]:
    """Return the times of each alternative. Every round runs each once and starts with another one; one extra round warms up.
    `prepare` makes what an alternative consumes; its time does not count.
    """
    names = list(alternatives)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(repetitions + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            given = prepare()
            took = timed(alternatives[name], given)
            del given
            if turn:
                samples[name].append(took)
    return {name: _summary(taken) for name, taken in samples.items()}


def _summary(samples: list[tuple[float, float]]) -> MeasuredTimes:
    walls = sorted(wall for wall, _ in samples)
    at = lambda share: walls[round(share * (len(walls) - 1))]  # noqa: E731
    return MeasuredTimes(statistics.median(walls), at(0.2), at(0.8), statistics.median(cpu for _, cpu in samples))


def peak_extra_bytes(run: Callable[[], Any]) -> int:
    """Return the peak bytes that PyTorch's CPU allocator held during `run`, above the start, with operators' temporaries."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        out = run()
    del out
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def bytes_moved(run: Callable[[], Any], cache: int = CACHE_BYTES) -> int:
    """Return the bytes that the operators of `run` read from memory and write to it: their operands; views are free.

    It is a count, not a measurement, and the same on every machine. Operands whose whole storage is at most `cache` bytes are
    assumed to stay in the cache, all others never to be in it. What an operator allocates internally is not seen.
    """
    with _Bytes(cache) as counted:
        run()
    return counted.total


class _Bytes(TorchDispatchMode):
    def __init__(self, cache: int) -> None:
        super().__init__()
        self.total, self.cache = 0, cache

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or func.overloadpacket.__name__ in _FREE:
            return out
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not argument.kwarg_only or argument.name != "out"
            for x in _tensors(given.get(argument.name)):
                self.total += self._size(x) * ((reads and not _only_written(func, argument.name)) + writes)
        for returned, x in zip(func._schema.returns, out if isinstance(out, tuple) else (out,), strict=False):
            if returned.alias_info is None:  # otherwise the result is one of the arguments
                self.total += sum(self._size(t) for t in _tensors(x))
        return out

    def _size(self, x: torch.Tensor) -> int:
        """Return the bytes of x's elements, a broadcast dimension counted once; 0 if x is assumed to stay in the cache."""
        if x.untyped_storage().nbytes() <= self.cache:
            return 0
        elements = 1
        for size, stride in zip(x.shape, x.stride(), strict=True):
            elements *= size if stride else 1
        return elements * x.element_size()


_FREE = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "detach", "_unsafe_view", "lift_fresh"}


def _only_written(func: Any, argument: str) -> bool:
    """Return whether the operator overwrites an argument without reading it."""
    return argument == "self" and func.overloadpacket.__name__ in ("copy_", "fill_", "zero_")


def _tensors(x: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(x)[0] if isinstance(t, torch.Tensor)]


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count collectives, sends and receives inside the block, by the dispatcher's name for each.

    They are counted however they are called: by torch.distributed, its functional form or Megatron-Core, in forward or
    backward.
    """
    counts: Counter[str] = Counter()
    with _Collectives(counts):
        yield counts


class _Collectives(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and name != "wait_tensor":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
