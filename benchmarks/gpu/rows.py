"""Log-prob and entropy (row 8), and with the output layer (row 9), on a GPU: calls, inputs, shares of the ceilings.

The peers are verl's and TRL's functions, unfused; the plain formula, also by torch.compile; Liger's cross-entropy, which
gives log-probs without entropies. `copy pair`: the time to move the logits three times (forward reads them, backward reads and
writes) at the measured bandwidth of a copy. `three GEMMs`: the products that give the logits, and their gradient with the
weight and with the hidden states, in bf16. Times are by CUDA events; on a CPU, to test the code, by its clock.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks._measure import Call, interleaved, on_host, peak_extra_bytes
from benchmarks._token_stats_peers import Statistics, alternatives, plain_formula
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


def measure(
    device: torch.device, rows: int = ROWS, vocab: int = VOCAB, hidden: int = HIDDEN,
    repetitions: int = 20, square: int = SQUARE, only: Collection[int] = (8, 9),
) -> Iterator[Measure]:  # fmt: skip
    """Yield each measure when it is known. Fused kernels of peers run only on a GPU."""
    statistics, on_gpu = alternatives(forms=True), device.type == "cuda"
    size = 2 * rows * vocab
    logit_calls: dict[str, Call] = {k: partial(forward_backward, s) for k, s in statistics.items()}
    layer_calls: dict[str, Call] = {
        OURS: partial(our_layer, budget=size), "ours, logits computed again": partial(our_layer, budget=0),
        "ours, mm then add": partial(our_layer_mm_then_add, budget=size), GEMMS: gemms,
        "plain": partial(unfused_layer, statistics=plain_formula),
    }  # fmt: skip
    if on_gpu:
        logit_calls["compiled"] = partial(forward_backward, torch.compile(plain_formula))
        layer_calls["compiled"] = partial(unfused_layer, statistics=torch.compile(plain_formula))
        if find_spec("liger_kernel") is None:
            print("liger is left out: it is not installed", file=sys.stderr)
        else:
            logit_calls["liger"], layer_calls["liger"] = liger_statistics, liger_layer

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
    size = f"{shape[0]} x {shape[1]} bf16" + (f", hidden {shape[2]}" if row == 9 else "")
    yield Measure(row, f"extra memory, {size}", "GiB", gib.pop(OURS), gib)
    taken = seconds(prepare, {name: calls[name] for name in peak}, device, repetitions)
    more = {"ceilings": ceilings, "share_of_ceiling": {name: least / s for name, s in taken.items()}}
    if row == 8:
        taken[COPY] = least
    others = {k: v for k, v in taken.items() if k != OURS}
    yield Measure(row, f"time, {size}", "s", taken[OURS], others, TARGETS[row], more=more)
