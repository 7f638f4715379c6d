"""Part `kernels`: token statistics, output layer and SwiGLU against fp64; their time and memory, and that of attention."""

import functools
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.check.lines import Check, Skip
from benchmarks.gpu.check.parts import ATTENTION_FORMS, OTHER_LENGTHS, WITHOUT_LOGITS
from benchmarks.gpu.rows import layer_of, matmul_rate, measure, our_layer, seconds
from benchmarks.results import OURS, Measure, verdict
from tepo_megatron.actor.attention_layout import AttentionLayout
from tepo_megatron.actor.packed_attention import PackedLayout
from tepo_megatron.dist.platform import activate
from tepo_megatron.ops.flash_attention import PackedFlash, packed_flash_of
from tepo_megatron.ops.vocab_parallel import token_stats
from tests.token_statistics import reference

# comparison with fp64: rows, real columns, columns with padding, hidden size
EXACT = {"cpu": (16, 1000, 1024, 64), "cuda": (64, 151_936, 152_064, 1024)}
# measurement: rows, columns, hidden size, repetitions, size of the square product that sets the ceiling
TIMED = {"cpu": (64, 2000, 64, 2, 128), "cuda": (8192, 151_936, 5120, 10, 8192)}
# sequence lengths and width of the activation
GATED = {"cpu": ((24, 40), 32), "cuda": ((8192, 6000), 6144)}
FIRST_CALLS = ("SwiGLU: first call", "SwiGLU: first call with another length")
LIMITS = {
    "statistics": 1e-5, "gradient of fp32": 1e-5, "gradient of bf16": 1.001, "output layer": 0.01,
    "activation": 8 * 2**-9,  # at most eight roundings to bf16 on the way to a gradient
}  # fmt: skip
TITLES = {8: "statistics", 9: "output layer"}
PEERS = ("trl", "verl")
# lengths of the sequences; heads, key-value heads, channels; rows of the product that gives the rate
ATTENTION = {"cpu": ((64, 48), (4, 2, 8), 128), "cuda": ((3200, 2100, 1600, 1000, 292), (16, 8, 128), 8192)}
OTHERS = 3  # other lengths, of which the median counts
SHIFT = 8  # by which they differ
PRODUCTS = 7  # of queries with keys, two in forward and five in backward; causal attention needs half of each


def run(check: Check) -> None:
    """Compare a kernel with fp64, then measure it."""
    tasks = {
        "statistics": _run_statistics, "output layer": _run_layer, "activation": _run_activation, "attention": _run_attention,
    }  # fmt: skip
    tasks[check.task](check)


def _run_statistics(check: Check) -> None:
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with check.line(f"error: statistics of {name} logits"):
            _statistics(check, f"error: statistics of {name} logits", dtype, torch.device(check.platform))
    measures = _measured(check, 8)
    with check.line(*(f"statistics: {peer}" for peer in PEERS)):
        _peers(check, measures)


def _run_layer(check: Check) -> None:
    for name, budget in (("logits kept", 2**40), (WITHOUT_LOGITS, 0)):
        with check.line(f"error: output layer, {name}"):
            _layer(check, f"error: output layer, {name}", budget, torch.device(check.platform))
    _measured(check, 9)


def _run_activation(check: Check) -> None:
    """Run Megatron's SwiGLU, which torch.compile makes on a GPU: once for one length, then once for all."""
    activate(check.platform)
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    device, error = torch.device(check.platform), 0.0
    lengths, width = GATED[check.platform]
    with check.line("error: SwiGLU", *FIRST_CALLS):
        for length, line in zip(lengths, FIRST_CALLS, strict=True):
            generator = torch.Generator(device).manual_seed(0)
            x = torch.randn(length, 1, 2 * width, device=device, generator=generator).bfloat16().requires_grad_()
            upstream = torch.randn(length, 1, width, device=device, generator=generator).bfloat16()
            start = time.perf_counter()
            out = bias_swiglu_impl(x, None)
            (gradient,) = torch.autograd.grad(out, x, upstream)
            gradient.sum().item()  # waits for the device
            check.report(line, "measured", time.perf_counter() - start, "s", "forward and backward, with compilation")
            exact = x.detach().double().requires_grad_()
            gate, value = exact.chunk(2, dim=-1)
            expected = torch.nn.functional.silu(gate) * value
            (expected_gradient,) = torch.autograd.grad(expected, exact, upstream.double())
            error = max(error, distance(out, expected), distance(gradient, expected_gradient))
        check.verdict("error: SwiGLU", error, LIMITS["activation"])


def _statistics(check: Check, line: str, dtype: torch.dtype, device: torch.device) -> None:
    """Compare log-probs, entropies and the gradient of logits around 0 and around 100. Padding columns are far larger."""
    rows, vocab, padded, _ = EXACT[check.platform]
    worst = {"statistics": 0.0, "gradient": 0.0}
    for shift in (0.0, 100.0):
        generator = torch.Generator(device).manual_seed(0)
        source = torch.randn(rows, padded, device=device, generator=generator).mul_(3).add_(shift).to(dtype)
        source[:, vocab:] = 1e4
        labels = torch.randint(0, vocab, (rows,), device=device, generator=generator)
        gradients = torch.randn(2, rows, device=device, generator=generator)
        logits = source.clone().requires_grad_() * 1  # not a leaf, so that backward may write into it
        stats = token_stats(logits, labels, 1.0, None, vocab)
        (gradient,) = torch.autograd.grad([stats.logprob_R, stats.entropy_R], logits, list(gradients))
        exact = source.double().requires_grad_()
        logprob, entropy = reference(exact, labels, 1.0, vocab)
        (expected,) = torch.autograd.grad([logprob, entropy], exact, list(gradients.double()))
        error = max((stats.logprob_R - logprob).abs().max().item(), (stats.entropy_R - entropy).abs().max().item())
        off = distance(gradient, expected)
        if dtype == torch.bfloat16:  # relative to the error of rounding the exact gradient once
            off /= distance(expected.to(dtype), expected)
        worst = {"statistics": max(worst["statistics"], error), "gradient": max(worst["gradient"], off)}
    limit = LIMITS[f"gradient of {'bf16' if dtype == torch.bfloat16 else 'fp32'}"]
    good = worst["statistics"] <= LIMITS["statistics"] and worst["gradient"] <= limit
    unit = "times the rounding of bf16" if dtype == torch.bfloat16 else "relative"
    why = f"limit {LIMITS['statistics']:g}; gradient: {worst['gradient']:.2g} {unit}, limit {limit:g}"
    check.report(line, "passed" if good else "failed", worst["statistics"], "nats", why)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the relative distance ||a - b|| / ||b||."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def _layer(check: Check, line: str, budget: int, device: torch.device) -> None:
    """Compare the fused layer's gradients with those of fp64 on the logits that it rounds to bf16."""
    rows, vocab, _, hidden = EXACT[check.platform]
    given = layer_of(8 * rows, vocab // 8, hidden, device)()
    states, weight, labels, gradients = given
    found = our_layer(given, budget)
    logits = (states @ weight.t()).detach().double().requires_grad_()
    outputs = reference(logits, labels, 1.0, vocab // 8)
    (expected,) = torch.autograd.grad(outputs, logits, list(gradients.double()))
    assert found[0] is not None
    pairs = [(found[0], expected @ weight.double()), (weight.main_grad, expected.t() @ states.double())]
    check.verdict(line, max(distance(a, b) for a, b in pairs), LIMITS["output layer"])


def _peers(check: Check, measures: Sequence[Measure]) -> None:
    """Report the token statistics of each peer: of its own code if it is installed, otherwise of our form of it."""
    if len(measures) < 2:
        raise Skip("the statistics could not be measured")
    peaks, times = measures
    for peer in PEERS:
        name = peer if peer in times.peers else f"{peer} form"
        line = f"statistics: {peer}"
        if name not in times.peers or not times.ours or name not in peaks.peers:
            check.report(line, "skipped", why=f"{name} did not run at this size")
            continue
        why = f"{name}: {times.peers[name] / times.ours:.2g}x our time; {peaks.peers[name]:.3g} {peaks.unit} of extra memory"
        check.report(line, "measured", times.peers[name], times.unit, why)


def _measured(check: Check, row: int) -> list[Measure]:
    """Report a row of `benchmarks/gpu/rows.py`, each measure when it is known. A missed target is no failure."""
    measures: list[Measure] = []
    title = TITLES[row]
    with check.line(f"{title}: extra memory", f"{title}: time"):
        rows, vocab, hidden, repetitions, square = TIMED[check.platform]
        for one in measure(torch.device(check.platform), rows, vocab, hidden, repetitions, square, (row,)):
            measures.append(one)
            peers = ", ".join(f"{name} {value:.3g}" for name, value in one.peers.items())
            shares: dict[str, Any] = dict(one.more.get("share_of_ceiling", {}))
            share = f"; {shares[OURS]:.0%} of the ceiling" if OURS in shares else ""
            target = f"; {verdict(one.as_object())}: {' and '.join(map(str, one.targets))}" if one.targets else ""
            why = f"{one.name}; others: {peers}{share}{target}"
            what = "extra memory" if "extra memory" in one.name else "time"
            check.report(f"{title}: {what}", "measured", one.ours, one.unit, why, measure=one.as_object())
    return measures


def _run_attention(check: Check) -> None:
    """Time attention of a packed microbatch, forward and backward: packed, and by SDPA in buckets; also with new lengths."""
    device, (lengths, (heads, kv_heads, channels), square) = torch.device(check.platform), ATTENTION[check.platform]
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
            given = _attention_inputs(sum(lengths), heads, kv_heads, channels, device)
            call = functools.partial(attend, lengths=lengths)
            median = seconds(lambda given=given: given, {form: call}, device, 5)[form]  # type: ignore[misc]
            share = PRODUCTS * heads * channels * sum(n**2 for n in lengths) / median / rate
            what = f"forward and backward of {len(lengths)} sequences, {sum(lengths)} tokens, {heads} heads"
            check.report(f"attention {form}", "measured", median, "s", f"{what}; {share:.0%} of the matmul rate")
            why = f"first call with lengths not seen before; the very first call {first:.3g} s"
            check.report(f"attention {form}, {OTHER_LENGTHS}", "measured", statistics.median(others), "s", why)


def _first_call(attend: Any, lengths: Sequence[int], sizes: tuple[int, int, int], device: torch.device) -> float:
    """Return the seconds of a call, until its results are there."""
    given = _attention_inputs(sum(lengths), *sizes, device)
    given[0].sum().item()
    start = time.perf_counter()
    attend(given, lengths=lengths)[0].sum().item()
    return time.perf_counter() - start


def _attention_inputs(tokens: int, heads: int, kv_heads: int, channels: int, device: torch.device) -> list[Tensor]:
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
