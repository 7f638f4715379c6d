"""Measure log-prob and entropy of the logits, forward and backward, on a CPU: ours next to TRL, verl and the plain formula.

    python -m benchmarks --only 1,2,3,4 [--peers DIR] [--quick]

All run in one process and in turn. Peers that are not installed are left out; `make bench` puts them into .cache/peers. The
comparison is with their own PyTorch code for CPUs in bf16, as their trainers call it, not with their fused GPU kernels.
Backward begins with random gradients of all outputs and ends at the logits. U is the size of the logits in bf16.

Measured: peak extra memory; bytes that operators read from and write to memory (a count); seconds of both passes, also with the
entropy as a metric without a gradient, and the CPU seconds of the process in the same runs (the better figure on a busy
machine); errors against fp64 on the same logits; collectives over tensor-parallel ranks. Those of whole objectives over
context-parallel ranks, and the rows that reach the output layer, are counted by tests/parallel.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._measure import MeasuredTimes, bytes_moved, counted_collectives, interleaved, peak_extra_bytes
from benchmarks._token_stats_peers import Statistics, alternatives, ours, vocab_parallel
from benchmarks.results import OURS, Measure, SuiteOptions, Target

Inputs = tuple[Tensor, Tensor, Tensor]  # logits [R, V], not a leaf; labels [R]; gradients [2, R]
Shape = tuple[int, int]
MEMORY_SHAPES: tuple[Shape, ...] = ((8192, 18992), (1024, 32000))
GATE_SHAPE = MEMORY_SHAPES[1]  # small enough for a test
TIME_SHAPES: tuple[Shape, ...] = ((256, 18992), (1024, 32000))
REPETITIONS = 9
ERROR_SHAPE: Shape = (64, 32000)
SPLIT_SHAPE: Shape = (64, 1000)  # of the logits that tensor-parallel ranks share
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
MEMORY_TARGET = (Target(OURS, "<=", 0.1),)  # U
TIME_TARGETS = (Target("trl / ours", ">=", 1.5), Target("verl / ours", ">=", 3.0))
ERROR_TARGETS = {"log-prob": 2e-6, "entropy": 2e-6, "gradient": 1e-5}  # fp32: nats, nats, relative


def inputs(shape: Shape, dtype: torch.dtype, shift: float = 0.0) -> Callable[[], Inputs]:
    """Return a function that makes fresh logits of the same values, as an output layer would: not a leaf, used once."""
    generator = torch.Generator().manual_seed(0)
    source = (torch.randn(shape, generator=generator) * 3 + shift).to(dtype).requires_grad_()
    labels = torch.randint(0, shape[1], shape[:1], generator=generator)
    gradients = torch.randn(2, shape[0], generator=generator)
    return lambda: (source.clone(), labels, gradients)


def forward_backward(statistics: Statistics, given: Inputs, entropy_gradient: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-prob, entropy, gradient of the logits)."""
    logits, labels, gradients = given
    logprob, entropy = statistics(logits, labels)
    outputs = [logprob, entropy] if entropy_gradient else [logprob]
    upstream = [g.to(x.dtype) for g, x in zip(gradients, outputs, strict=False)]
    (gradient,) = torch.autograd.grad(outputs, logits, upstream)
    return logprob, entropy, gradient


def logprob_only(statistics: Statistics, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same with the entropy as a metric: computed, without a gradient."""

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logprob, entropy = statistics(x, y)
        return logprob, entropy.detach()

    return forward_backward(run, given, entropy_gradient=False)


def memory(them: dict[str, Statistics], shape: Shape, dtype: torch.dtype, threads: int) -> list[Measure]:
    """Measure peak extra memory and, with one thread, bytes moved (the same for any number of threads), in U."""
    torch.set_num_threads(threads)
    u = 2 * shape[0] * shape[1]
    prepare = inputs(shape, dtype)
    peak: dict[str, float] = {}
    moved: dict[str, float] = {}
    for name, statistics in them.items():
        run = functools.partial(forward_backward, statistics, prepare())
        counted: list[int] = []
        peak[name] = peak_extra_bytes(lambda: counted.append(bytes_moved(run))) / u  # noqa: B023
        moved[name] = counted[0] / u
    targets = MEMORY_TARGET if dtype == torch.bfloat16 and shape == MEMORY_SHAPES[0] else ()
    # our two buffers grow with the threads: a gate measures with one
    gate = shape == GATE_SHAPE and dtype == torch.bfloat16 and threads == 1
    found = [_measure(1, "extra memory", peak, shape, dtype, "U", targets, threads=threads, deterministic=gate)]
    return found if threads > 1 else [*found, _measure(1, "bytes moved", moved, shape, dtype, "U", deterministic=gate)]


def times(them: dict[str, Statistics], shape: Shape, threads: int, repetitions: int) -> list[Measure]:
    """Measure seconds with bf16 logits, all alternatives in turn."""
    torch.set_num_threads(threads)
    found = []
    for name, run in (("time", forward_backward), ("time, entropy without gradient", logprob_only)):
        calls = {k: (lambda given, s=s, run=run: run(s, given)) for k, s in them.items()}
        taken: dict[str, MeasuredTimes] = interleaved(inputs(shape, torch.bfloat16), calls, repetitions)
        more: dict[str, Any] = {
            "spread": {k: [t.low, t.high] for k, t in taken.items()},
            "cpu": {k: t.cpu for k, t in taken.items()},
        }
        walls = {k: t.wall for k, t in taken.items()}
        targets = TIME_TARGETS if run is forward_backward else ()
        found.append(_measure(2, name, walls, shape, torch.bfloat16, "s", targets, threads=threads, **more))
    return found


def errors(them: dict[str, Statistics], shape: Shape, dtype: torch.dtype, shift: float) -> list[Measure]:
    """Measure, against fp64, the largest error of log-prob and entropy (nats) and the gradient's relative error (2-norm)."""
    prepare = inputs(shape, dtype, shift)
    logits, labels, gradients = prepare()
    exact = logits.detach().double().requires_grad_()
    logp = torch.log_softmax(exact, dim=-1)
    truth = (logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1))
    (gradient,) = torch.autograd.grad(truth, exact, list(gradients.double()))
    found: dict[str, dict[str, float]] = {name: {} for name in ERROR_TARGETS}
    for name, statistics in them.items():
        logprob, entropy, theirs = forward_backward(statistics, prepare())
        found["log-prob"][name] = (logprob - truth[0]).abs().max().item()
        found["entropy"][name] = (entropy - truth[1]).abs().max().item()
        found["gradient"][name] = ((theirs - gradient).norm() / gradient.norm()).item()
    out = []
    for what, values in found.items():
        # plain computes in fp32 and rounds its gradient to bf16 once, as ours does
        absolute = Target(OURS, "<=", ERROR_TARGETS[what])
        target = absolute if dtype == torch.float32 else Target("ours / plain", "<=", 1.0)
        name = f"{what} of logits shifted by {shift:g}"
        out.append(_measure(3, name, values, shape, dtype, "" if what == "gradient" else "nats", (target,)))
    return out


def _measure(row: int, what: str, values: dict[str, float], shape: Shape, dtype: torch.dtype, unit: str,
             targets: tuple[Target, ...] = (), threads: int | None = None, deterministic: bool = False,
             **more: Any) -> Measure:  # fmt: skip
    name = f"{what}, {shape[0]} x {shape[1]} {DTYPES[dtype]}"
    if threads is not None:
        name += f", {threads} thread{'s' if threads > 1 else ''}"
        more["threads"] = threads
    peers = {k: v for k, v in values.items() if k != OURS}
    more |= {"shape": list(shape), "dtype": DTYPES[dtype]}
    return Measure(row, name, unit, values[OURS], peers, targets, deterministic=deterministic, more=more)


def measures(options: SuiteOptions, part: str = "") -> list[Measure]:
    """Measure the rows of this module that the options name; those of the part `collectives` are counted in forked ranks."""
    if part == "collectives":
        return collectives()
    them, quick = alternatives(), options.quick
    before = torch.get_num_threads()
    found = []
    if 1 in options.rows:
        for shape in ((512, 18992),) if quick else MEMORY_SHAPES:
            found += memory(them, shape, torch.bfloat16, 1)
            found += memory(them, shape, torch.bfloat16, 2)
        found += memory(them, (512, 18992) if quick else MEMORY_SHAPES[0], torch.float32, 1)
    if 2 in options.rows:
        for threads in (1, 2):
            for shape in ((64, 18992),) if quick else TIME_SHAPES:
                found += times(them, shape, threads, 2 if quick else REPETITIONS)
    torch.set_num_threads(before)
    if 3 in options.rows:
        for dtype in DTYPES:
            for shift in (0.0, 100.0):
                found += errors(them, ERROR_SHAPE, dtype, shift)
    return found


def tensor_parallel(rank: int, size: int) -> dict[str, tuple[int, int, int]]:
    """Return {name: (collectives in forward, in backward, rows that are not the same bits on all ranks)} on every rank."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(SPLIT_SHAPE, generator=generator)
    labels = torch.randint(0, SPLIT_SHAPE[1], SPLIT_SHAPE[:1], generator=generator)
    counted = {}
    for name, statistics in vocab_parallel(size).items():
        logits = whole.chunk(size, dim=1)[rank].clone().requires_grad_() * 1
        with counted_collectives() as calls:
            logprob, entropy = statistics(logits, labels)
            forward = calls.total()
            (logprob.sum() + entropy.sum()).backward()
            backward = calls.total() - forward
        mine = torch.stack((logprob, entropy)).detach()
        of_ranks = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(of_ranks, mine)
        differing = torch.stack([(x != of_ranks[0]).any(0) for x in of_ranks]).any(0).sum()
        counted[name] = (forward, backward, int(differing))
    return counted


def collectives() -> list[Measure]:
    """Count the collectives over 2 and 4 ranks, forked ones over gloo with one thread each; the same on every machine."""
    from tepo_megatron.dist.platform import activate

    activate("cpu")
    from tests.worlds import run_world

    found = []
    for size in (2, 4):
        counted = run_world(size, tensor_parallel, size, timeout=300.0)[0]
        for column, (what, limit) in enumerate((("forward", 1), ("backward", 0), ("rows that differ between ranks", 0))):
            others = {name: float(counts[column]) for name, counts in counted.items() if name != OURS}
            name, targets = f"log-prob + entropy, TP{size}, {what}", (Target(OURS, "<=", limit),)
            found.append(Measure(4, name, "", float(counted[OURS][column]), others, targets, deterministic=True))
    return found


def gates() -> list[Measure]:
    """Measure only ours, and only what is the same on every machine."""
    return memory({OURS: ours}, GATE_SHAPE, torch.bfloat16, 1)
