"""Part `kernels`: token statistics, output layer and SwiGLU against fp64; their time and memory, and that of attention."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.check.attention import run_attention
from benchmarks.gpu.check.lines import Check, Skip
from benchmarks.gpu.check.parts import WITHOUT_LOGITS
from benchmarks.gpu.rows import layer_of, measure, our_layer
from benchmarks.results import OURS, Measure, verdict
from tepo_megatron.ops.vocab_parallel import token_stats
from tepo_megatron.platform import activate
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


def run(check: Check) -> None:
    """Compare a kernel with fp64, then measure it."""
    tasks = {
        "statistics": _run_statistics, "output layer": _run_layer, "activation": _run_activation, "attention": run_attention,
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
    """Report a row of `python -m benchmarks.gpu`, each measure when it is known. A missed target is no failure."""
    measures: list[Measure] = []
    title = TITLES[row]
    with check.line(f"{title}: extra memory", f"{title}: time"):
        rows, vocab, hidden, repetitions, square = TIMED[check.platform]
        for one in measure(None, torch.device(check.platform), rows, vocab, hidden, repetitions, square, (row,)):
            measures.append(one)
            peers = ", ".join(f"{name} {value:.3g}" for name, value in one.peers.items())
            shares: dict[str, Any] = dict(one.more.get("share_of_ceiling", {}))
            share = f"; {shares[OURS]:.0%} of the ceiling" if OURS in shares else ""
            target = f"; {verdict(one.as_object())}: {' and '.join(map(str, one.targets))}" if one.targets else ""
            why = f"{one.name}; others: {peers}{share}{target}"
            what = "extra memory" if "extra memory" in one.name else "time"
            check.report(f"{title}: {what}", "measured", one.ours, one.unit, why, measure=one.as_object())
    return measures
