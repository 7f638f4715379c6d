"""Seconds of a GPU's kernels by kind, and when they ran, from one trace of PyTorch's profiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# the first pattern that a kernel's name contains decides
KINDS = {
    "attention": r"flash|fmha|attention|cudnn.*sdpa",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|splitK",
    "token statistics": r"^_statistics|^_gradient|^_truncated",
    "compiled SwiGLU": r"^triton_",
    "norms": r"rms_?norm|layer_?norm|GammaBeta",
    "optimizer": r"multi_tensor|adam|foreach",
    "copies": r"memcpy|memset|copy|Cat|cat_|fill",
    "gather and scatter": r"index|gather|scatter|embedding",
    "sums": r"reduce",
    "other elementwise": r"",
}
BINS = 400  # of the timeline


@dataclass
class KernelTimes:
    """The kernels of one call.

    Attributes:
        seconds: From the first kernel's start to the last one's end.
        busy: Seconds in which at least one kernel ran.
        timeline: For each kind the share of each of BINS equal parts of `seconds` in which it ran.
    """

    seconds: float = 0.0
    busy: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)
    timeline: dict[str, list[float]] = field(default_factory=dict)


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE))


def kernel_times(call: Callable[[], Any]) -> KernelTimes:
    """Trace a call on a GPU, and return the times of its kernels; empty if it ran none."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    events = [e for e in trace.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    return summary([(e.name(), e.start_ns() / 1e9, e.duration_ns() / 1e9) for e in events])


def summary(events: list[tuple[str, float, float]]) -> KernelTimes:
    """Return the times of kernels: name, start and duration of each, in seconds."""
    if not events:
        return KernelTimes()
    events = sorted(events, key=lambda event: event[1])
    start, end = events[0][1], max(at + seconds for _, at, seconds in events)
    found, until = KernelTimes(seconds=end - start), start
    kinds, kernels, width = Counter[str](), Counter[str](), (end - start) / BINS or 1.0
    timeline = {kind: [0.0] * BINS for kind in KINDS}
    for name, at, seconds in events:
        kind = kind_of(name)
        kinds[kind] += seconds  # type: ignore[assignment]
        kernels[name[:120]] += seconds  # type: ignore[assignment]
        found.busy += max(0.0, at + seconds - max(until, at))
        until = max(until, at + seconds)
        first, last = (min(BINS - 1, int((t - start) / width)) for t in (at, at + seconds))
        for i in range(first, last + 1):
            here = min(at + seconds, start + (i + 1) * width) - max(at, start + i * width)
            timeline[kind][i] += max(0.0, here) / width
    found.kinds, found.kernels = dict(kinds.most_common()), dict(kernels.most_common(25))
    found.timeline = {kind: [round(x, 3) for x in shares] for kind, shares in timeline.items() if any(shares)}
    return found
