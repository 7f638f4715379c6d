"""Log-prob and entropy (row 8), and with the output layer (row 9), on a GPU: calls, inputs, shares of the ceilings.

The peers are verl's unfused functions and its fused kernel; TRL's functions; the plain formula, also by torch.compile; Liger's
cross-entropy, which gives log-probs without entropies. `copy pair`: the time to move the logits three times (forward reads
them, backward reads and writes) at the measured bandwidth of a copy. `three GEMMs`: the products that give the logits, and
their gradient with the weight and with the hidden states, in bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks._measure import Call
from benchmarks._token_stats_peers import Statistics, alternatives, plain_formula
from benchmarks.gpu._timing import copy_bandwidth, matmul_rate, peaks, seconds
from benchmarks.results import OURS, Measure, Target
from benchmarks.token_stats import Inputs, forward_backward
from tepo_megatron.ops import output_layer
from tepo_megatron.ops.output_layer import output_layer_stats

Layer = tuple[Tensor, Tensor, Tensor, Tensor]  # hidden [R, H], weight [V, H], labels [R], gradients [2, R]
ROWS, VOCAB, HIDDEN = 8192, 151936, 5120
SQUARE = 8192  # rows of the matrices whose product is the ceiling
COPY, GEMMS = "copy pair", "three GEMMs"
TARGETS = {
    8: (Target(f"ours / {COPY}", "<=", 1.3), Target("verl / ours", ">=", 10.0)),
    9: (Target(f"ours / {GEMMS}", "<=", 1.1),),
}


def name_of(row: int, what: str, rows: int, vocab: int, hidden: int) -> str:
    """Return the name of a measure."""
    return f"{what}, {rows} x {vocab} bf16" + (f", hidden {hidden}" if row == 9 else "")


def logits_of(rows: int, vocab: int, device: torch.device) -> Callable[[], Inputs]:
    """Return a function that makes fresh bf16 logits, not a leaf, and their labels and gradients."""
    torch.manual_seed(0)
    source = torch.randn(rows, vocab, dtype=torch.bfloat16, device=device).mul_(3).requires_grad_()
    labels = torch.randint(0, vocab, (rows,), device=device)
    gradients = torch.randn(2, rows, device=device)
    return lambda: (source.clone(), labels, gradients)


def layer_of(rows: int, vocab: int, hidden: int, device: torch.device) -> Callable[[], Layer]:
    """Return a function that gives the inputs of an output layer whose weight has a `main_grad` in fp32, as in Megatron."""
    torch.manual_seed(0)
    states = torch.randn(rows, hidden, dtype=torch.bfloat16, device=device).requires_grad_()
    weight = torch.randn(vocab, hidden, dtype=torch.bfloat16, device=device).mul_(3 * hidden**-0.5).requires_grad_()
    weight.main_grad = torch.zeros(vocab, hidden, device=device)
    labels = torch.randint(0, vocab, (rows,), device=device)
    gradients = torch.randn(2, rows, device=device)
    return lambda: (states, weight, labels, gradients)


def liger_statistics(given: Inputs) -> tuple[Tensor, ...]:
    """Run Liger's cross-entropy: only the log-prob, forward and backward."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    logits, labels, gradients = given
    loss = liger_cross_entropy(logits, labels, reduction="none")
    return torch.autograd.grad(loss, logits, -gradients[0].to(loss.dtype))


def our_layer(given: Layer, budget: int) -> tuple[Tensor | None, ...]:
    """Run our output layer, forward and backward. The weight's gradient is added to its `main_grad`."""
    hidden, weight, labels, gradients = given
    stats = output_layer_stats(hidden, weight, labels, 1.0, None, logits_budget=budget)
    outputs = [stats.logprob_R, stats.entropy_R]
    return torch.autograd.grad(outputs, [hidden, weight], list(gradients), allow_unused=True)


def our_layer_mm_then_add(given: Layer, budget: int) -> tuple[Tensor | None, ...]:
    """Run `our_layer` with the weight gradient's sum as before PyTorch 2.10: a product, then an addition in fp32."""
    fused, output_layer.ADDS_WITHIN_PRODUCT = output_layer.ADDS_WITHIN_PRODUCT, False
    try:
        return our_layer(given, budget)
    finally:
        output_layer.ADDS_WITHIN_PRODUCT = fused


def unfused_layer(given: Layer, statistics: Statistics) -> tuple[Tensor, ...]:
    """Run a linear layer, then statistics of its logits, forward and backward."""
    hidden, weight, labels, gradients = given
    outputs = statistics(linear(hidden, weight), labels)
    upstream = [g.to(x.dtype) for g, x in zip(gradients, outputs, strict=True)]
    return torch.autograd.grad(outputs, [hidden, weight], upstream)


def verl_fused_layer(given: Layer) -> tuple[Tensor, ...]:
    """Run verl's Triton kernel, forward and backward."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    hidden, weight, labels, gradients = given
    outputs = linear_cross_entropy(hidden, weight, labels, 1.0, "none", None)
    return torch.autograd.grad(outputs, [hidden, weight], [g.to(x.dtype) for g, x in zip(gradients, outputs, strict=True)])


def liger_layer(given: Layer) -> tuple[Tensor, ...]:
    """Run Liger's fused layer: only the log-prob; the weight's gradient is summed in fp32, as ours."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused

    hidden, weight, labels, gradients = given
    loss = fused(hidden, weight, labels, reduction="none", accum_dtype=torch.float32)
    return torch.autograd.grad(loss, [hidden, weight], -gradients[0].to(loss.dtype))


def gemms(given: Layer) -> tuple[Tensor, ...]:
    """Run the three products, the least work of the layer."""
    hidden, weight, _, _ = given
    hidden, weight = hidden.detach(), weight.detach()
    logits = torch.mm(hidden, weight.t())
    return torch.mm(logits, weight), torch.mm(logits.t(), hidden)


def installed(calls: Mapping[str, Call], module_of: Mapping[str, str]) -> dict[str, Call]:
    """Return the calls whose module can be imported."""
    found = dict(calls)
    for name, module in module_of.items():
        try:
            __import__(module)
        except ImportError as e:
            print(f"{name} is left out: {e}", file=sys.stderr)
            del found[name]
    return found


def measure(
    peers: Path | None, device: torch.device, rows: int = ROWS, vocab: int = VOCAB, hidden: int = HIDDEN,
    repetitions: int = 20, square: int = SQUARE, only: Collection[int] = (8, 9),
) -> Iterator[Measure]:  # fmt: skip
    """Yield each measure when it is known. Fused kernels of peers run only on a GPU."""
    statistics, on_gpu = alternatives(peers, forms=True), device.type == "cuda"
    size = 2 * rows * vocab
    logit_calls: dict[str, Call] = {k: partial(forward_backward, s) for k, s in statistics.items()}
    layer_calls: dict[str, Call] = {
        OURS: partial(our_layer, budget=size), "ours, logits computed again": partial(our_layer, budget=0),
        "ours, mm then add": partial(our_layer_mm_then_add, budget=size), GEMMS: gemms,
        "plain": partial(unfused_layer, statistics=plain_formula),
    }  # fmt: skip
    if "verl" in statistics:
        layer_calls["verl"] = partial(unfused_layer, statistics=statistics["verl"])
    if on_gpu:
        logit_calls["compiled"] = partial(forward_backward, torch.compile(plain_formula))
        layer_calls["compiled"] = partial(unfused_layer, statistics=torch.compile(plain_formula))
        liger = "liger_kernel.transformers.functional"
        logit_calls = installed(logit_calls | {"liger": liger_statistics}, {"liger": liger})
        fused = {"liger": liger, "verl fused": "verl.utils.kernel.linear_cross_entropy"}
        layer_calls = installed(layer_calls | {"liger": liger_layer, "verl fused": verl_fused_layer}, fused)

    if 8 in only:
        bandwidth = copy_bandwidth(size, device, repetitions)
        inputs, ceilings = logits_of(rows, vocab, device), {"copy_bytes_per_second": bandwidth}
        yield from _rows(8, inputs, logit_calls, device, repetitions, 3 * size / bandwidth, ceilings, (rows, vocab, hidden))
    if 9 in only:
        rate = matmul_rate(square, device, repetitions)
        layer, ceilings = layer_of(rows, vocab, hidden, device), {"matmul_operations_per_second": rate}
        least = 6 * rows * hidden * vocab / rate
        yield from _rows(9, layer, layer_calls, device, repetitions, least, ceilings, (rows, vocab, hidden))


def _rows(row: int, prepare: Callable[[], Any], calls: Mapping[str, Call], device: torch.device, repetitions: int,
          least: float, ceilings: dict[str, float], shape: tuple[int, int, int]) -> Iterator[Measure]:  # fmt: skip
    """Measure memory and time of a row's calls. `least` is the seconds at the ceiling; each call's share of it is recorded."""
    peak = peaks(prepare, calls, device)
    gib = {k: v / 2**30 for k, v in peak.items()}
    yield Measure(row, name_of(row, "extra memory", *shape), "GiB", gib.pop(OURS), gib)
    taken = seconds(prepare, {name: calls[name] for name in peak}, device, repetitions)
    more = {"ceilings": ceilings, "share_of_ceiling": {name: least / s for name, s in taken.items()}}
    if row == 8:
        taken[COPY] = least
    others = {k: v for k, v in taken.items() if k != OURS}
    yield Measure(row, name_of(row, "time", *shape), "s", taken[OURS], others, TARGETS[row], more=more)
