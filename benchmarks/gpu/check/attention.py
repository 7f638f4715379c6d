"""Time attention of a packed microbatch, forward and backward: packed, and by SDPA in buckets; also with new lengths."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu._timing import matmul_rate, seconds
from benchmarks.gpu.check.lines import Check, Skip
from benchmarks.gpu.check.parts import ATTENTION_FORMS, OTHER_LENGTHS
from tepo_megatron.actor.attention_layout import AttentionLayout
from tepo_megatron.actor.packed_attention import PackedLayout
from tepo_megatron.ops.flash_attention import PackedFlash, packed_flash_of

# lengths of the sequences; heads, key-value heads, channels; rows of the product that gives the rate
SIZES = {"cpu": ((64, 48), (4, 2, 8), 128), "cuda": ((3200, 2100, 1600, 1000, 292), (16, 8, 128), 8192)}
OTHERS = 3  # other lengths, of which the median counts
SHIFT = 8  # by which they differ
PRODUCTS = 7  # of queries with keys, two in forward and five in backward; causal attention needs half of each


def run_attention(check: Check) -> None:
    """Report the seconds of both forms."""
    device, (lengths, (heads, kv_heads, channels), square) = torch.device(check.platform), SIZES[check.platform]
    rate = matmul_rate(square, device, 5)
    for form in ATTENTION_FORMS:
        with check.line(f"attention {form}", f"attention {form}, {OTHER_LENGTHS}"):
            kernel = packed_flash_of(torch.empty(0, heads, channels, dtype=torch.bfloat16, device=device))
            if form == "packed" and kernel is None:
                raise Skip("no kernel takes packed sequences here")
            attend = functools.partial(_attend, kernel=kernel if form == "packed" else None)
            first = _first_call(attend, lengths, (heads, kv_heads, channels), device)
            others = [
                _first_call(attend, [n - i * SHIFT for n in lengths], (heads, kv_heads, channels), device)
                for i in range(1, OTHERS + 1)
            ]
            given = _inputs(sum(lengths), heads, kv_heads, channels, device)
            call = functools.partial(attend, lengths=lengths)
            median = seconds(lambda given=given: given, {form: call}, device, 5)[form]  # type: ignore[misc]
            share = PRODUCTS * heads * channels * sum(n**2 for n in lengths) / median / rate
            what = f"forward and backward of {len(lengths)} sequences, {sum(lengths)} tokens, {heads} heads"
            check.report(f"attention {form}", "measured", median, "s", f"{what}; {share:.0%} of the matmul rate")
            why = f"first call with lengths not seen before; the very first call {first:.3g} s"
            check.report(f"attention {form}, {OTHER_LENGTHS}", "measured", statistics.median(others), "s", why)


def _first_call(attend: Any, lengths: Sequence[int], sizes: tuple[int, int, int], device: torch.device) -> float:
    """Return the seconds of a call, until its results are there."""
    given = _inputs(sum(lengths), *sizes, device)
    given[0].sum().item()
    start = time.perf_counter()
    attend(given, lengths=lengths)[0].sum().item()
    return time.perf_counter() - start


def _inputs(tokens: int, heads: int, kv_heads: int, channels: int, device: torch.device) -> list[Tensor]:
    """Return query, key and value with gradients, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (heads, kv_heads, kv_heads, heads)
    *leaves, grad = (torch.randn(tokens, n, channels, device=device, generator=generator).bfloat16() for n in sizes)
    return [*(x.requires_grad_() for x in leaves), grad.flatten(1)]


def _attend(given: list[Tensor], lengths: Sequence[int], kernel: PackedFlash | None) -> tuple[Tensor, ...]:
    """Run attention forward and backward: packed, or without a kernel for that in buckets."""
    query, key, value, grad = given
    alone: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    if kernel is not None:
        output = PackedLayout.of(kernel, lengths, alone, query.device).attend(query, key, value, None)
        return torch.autograd.grad(output, [query, key, value], grad)
    layout = AttentionLayout.of(lengths, alone, query.device)
    parts = [x.split([bucket.query_rows for bucket in layout.buckets]) for x in layout.in_slots(query, key, value)]
    outputs = [bucket.attend(q, k, v, None) for bucket, q, k, v in zip(layout.buckets, *parts, strict=True)]
    output = torch.cat([x for found in outputs for x in found]).index_select(0, layout.query_slot_S).flatten(1)
    return torch.autograd.grad(output, [query, key, value], grad)
