"""Replace torch.cuda on the CPU, where all work is done when a call returns, and give requests for a CUDA device the CPU.

Every replacement is a function object of its own, because torch's tracer keeps a table of functions and refuses one object that
has two names in torch.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors


def redirect_device_queries() -> None:
    """Report that no GPU is available, and return the CPU as the current device."""
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0
    torch.cuda.current_device = lambda: CPU
    torch.cuda.get_device_capability = lambda device=None: (0, 0)
    torch.cuda.device = _context()
    for name in ("set_device", "synchronize", "init", "_lazy_init", "cudart"):
        setattr(torch.cuda, name, _returning(None))


def redirect_streams_and_events() -> None:
    """Replace streams and events by a single stream in order, on which nothing has to be waited for."""
    torch.cuda.Stream = HostStream
    torch.cuda.Event = Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: HostStream()
    torch.cuda.set_stream = _returning(None)
    torch.cuda.stream = _context()
    torch.cuda.is_current_stream_capturing = _returning(False)


def redirect_memory_statistics() -> None:
    """Report that no GPU memory is in use."""
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, _returning(0))
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated"):
        setattr(torch.cuda, name, _returning(None))
    torch.cuda.memory_stats = lambda device=None: {}
    torch.cuda.mem_get_info = lambda device=None: (0, 0)


def redirect_random_state() -> None:
    """Make the CPU's generator the only one. Megatron's trackers of parallel random states then swap its state.

    `_lazy_call` runs its callback at once: torch would keep the callback until CUDA starts, which never happens.
    """
    torch.cuda.default_generators = _OneGenerator()
    torch.cuda._lazy_call = lambda callback, **_: callback()
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device="cuda": torch.default_generator.get_state()
        module.set_rng_state = lambda state, device="cuda": torch.default_generator.set_state(state)
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))


def silence_nvtx() -> None:
    """Ignore NVTX ranges, because there is no profiler to receive them."""
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(torch.cuda.nvtx, name, _returning(None))
    torch.cuda.nvtx.range = _context()


class HostStream:
    """The only stream. All instances are equal."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream = CPU, 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostStream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> "HostStream":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait_stream(self, stream: "HostStream") -> None:
        """Do nothing: the work is done."""

    def wait_event(self, event: "Event") -> None:
        """Do nothing: the work is done."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record the current time in an event, and return the event."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Do nothing: the work is done."""

    def query(self) -> bool:
        """Return whether all work is done, which is always true."""
        return True


class Event:
    """A point in time on the only stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: HostStream | None = None) -> None:
        """Store the current time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: HostStream | None = None) -> None:
        """Do nothing: the work is done."""

    def synchronize(self) -> None:
        """Do nothing: the work is done."""

    def query(self) -> bool:
        """Return whether the work before the event is done, which is always true."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1e3


class _OneGenerator(dict[Any, torch.Generator]):
    def __missing__(self, device: Any) -> torch.Generator:
        return torch.default_generator


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _context() -> Callable[..., contextlib.AbstractContextManager[None]]:
    return lambda *_, **__: contextlib.nullcontext()


CPU = torch.device("cpu")

_LIKE_FACTORIES = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")


def redirect_factories() -> None:
    """Make factories ignore requests for a GPU: torch.zeros(device=torch.cuda.current_device()), pin_memory=True and the like.

    `with torch.device("meta")` recognises factories by identity, in a list that torch fills on first use. The list must be
    filled with the originals, which the wrappers call. Filled later, it would hold the wrappers and the context would recognise
    nothing. Hugging Face's `from_pretrained`, which builds models in this context, would then silently return wrong weights.
    """
    names = {constructor.__name__ for constructor in _device_constructors() if constructor.__module__ == "torch"}
    for name in (*sorted(names), *_LIKE_FACTORIES):
        if hasattr(torch, name):
            setattr(torch, name, _on_host(getattr(torch, name)))


def redirect_tensor_methods() -> None:
    """Make Tensor.to, .cuda, .pin_memory, .record_stream and .type work on the CPU. Modules are moved through these methods."""
    Tensor.to = _to(Tensor.to)
    Tensor.type = _type(Tensor.type)
    Tensor.cuda = lambda self, *args, **kwargs: self
    Tensor.pin_memory = lambda self, *args, **kwargs: self
    Tensor.record_stream = lambda self, stream: None


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory that creates tensors on the CPU when a CUDA device is requested, and never pins memory."""

    @functools.wraps(factory)
    def on_host(*args: Any, **kwargs: Any) -> Any:
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs and kwargs.get("pin_memory"):  # only CUDA page-locks memory
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_host


def _to(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a Tensor.to that keeps tensors on the CPU when a CUDA device is requested."""

    @functools.wraps(original)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Tensor.type that reports CUDA types to callers inside `megatron` only.

    Megatron's optimizers sort parameters by `param.type() == "torch.cuda.FloatTensor"` and refuse other types (0.16).
    """

    @functools.wraps(original)
    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        name = original(self)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return name.replace("torch.", "torch.cuda.", 1) if caller.startswith("megatron.") else name

    return type_
