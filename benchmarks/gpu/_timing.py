"""Times by CUDA events, peak memory, and the machine's own ceilings. On a CPU (to test the code) times are by its clock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks._measure import Call, interleaved, on_host, peak_extra_bytes
from benchmarks.results import OURS


def on_gpu(call: Call, given: Any) -> tuple[float, float]:
    """Return the seconds between two CUDA events around the call, its launches included, and a number without meaning."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    out = call(given)
    end.record()
    torch.cuda.synchronize()
    del out
    return start.elapsed_time(end) / 1e3, 0.0


def seconds(
    prepare: Callable[[], Any], alternatives: Mapping[str, Call], device: torch.device, repetitions: int
) -> dict[str, float]:
    """Return the median seconds of each alternative, all in turn."""
    timed = on_gpu if device.type == "cuda" else on_host
    return {name: t.wall for name, t in interleaved(prepare, alternatives, repetitions, timed).items()}


def peak_bytes(call: Call, given: Any, device: torch.device) -> int:
    """Return the peak bytes allocated during the call, above the start."""
    if device.type != "cuda":
        return peak_extra_bytes(lambda: call(given))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(given)
    torch.cuda.synchronize()
    del out
    return torch.cuda.max_memory_allocated() - before


def peaks(prepare: Callable[[], Any], alternatives: Mapping[str, Call], device: torch.device) -> dict[str, int]:
    """Return the peak bytes of each alternative's second call. Peers that fail, perhaps for lack of memory, are left out."""
    found = {}
    for name, call in alternatives.items():
        try:
            call(prepare())
            found[name] = peak_bytes(call, prepare(), device)
        except Exception as e:  # a peer's kernel may raise anything on this machine: measure the others all the same
            if name == OURS:
                raise
            print(f"{name} is left out: {type(e).__name__}: {e}", file=sys.stderr)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def copy_bandwidth(size: int, device: torch.device, repetitions: int) -> float:
    """Return the bytes per second, read and written, of copying `size` bytes on the device."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / seconds(lambda: None, {"copy": lambda _: target.copy_(source)}, device, repetitions)["copy"]


def matmul_rate(size: int, device: torch.device, repetitions: int) -> float:
    """Return the floating-point operations per second of a bf16 product of two square matrices."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / seconds(lambda: None, {"mm": lambda _: torch.mm(a, b)}, device, repetitions)["mm"]
