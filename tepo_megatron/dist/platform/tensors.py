"""Redirect tensor factories and methods, so that a request for a CUDA device gets the CPU."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

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
