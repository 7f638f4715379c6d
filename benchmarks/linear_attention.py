"""Measure the cost per token of the gated delta rule, at several lengths, next to attention (SDPA) at the same lengths.

    python -m benchmarks.linear_attention [--quick] [--repetitions 5] [--out FILE]

One thread, fp32. The delta rule has 8 heads of 128 for keys and values; the convolution has its 3,072 channels; attention has 4
heads of 256 and one key-value head, as in a layer of the same width. Projections are in neither. Alternatives run in turn, and
the figure is the least CPU time per token of all rounds, because other processes only add to it. Backward is the time of both
passes minus the time of forward.

The target is that the backward pass of the delta rule costs the same per token at all lengths, within a factor of TARGET. With
the full sizes and without it, the program ends with status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._measure import on_host
from benchmarks.results import ROOT, commit, machine
from tepo_megatron.ops.gated_delta_rule import SequenceChunks, gated_delta_rule, normalize
from tepo_megatron.ops.packed_convolution import packed_convolution, positions

OUT = ROOT / "benchmarks/results/linear_attention.md"
HEADS, CHANNELS = 8, 128
ATTENTION_HEADS, ATTENTION_CHANNELS = 4, 256
WIDTH = 4
LENGTHS: tuple[tuple[int, ...], ...] = ((1024,), (2048,), (4096,), (8192,))
PACKED: tuple[tuple[int, ...], ...] = ((128,) * 16, (512,) * 8)
TARGET = 1.3
CPU = torch.device("cpu")

Make = Callable[[], tuple[Tensor, ...]]
Row = dict[str, tuple[float, float]]


def delta_rule(lengths: Sequence[int]) -> tuple[Make, Callable[..., Tensor]]:
    """Return functions that make the inputs of the delta rule, and that compute it. Args: tokens of each sequence."""
    chunks, total = SequenceChunks.of(lengths, CPU), sum(lengths)

    def make() -> tuple[Tensor, ...]:
        q, k = (normalize(torch.randn(total, HEADS, CHANNELS)) for _ in range(2))
        values = (torch.randn(total, HEADS, CHANNELS), -torch.rand(total, HEADS), torch.rand(total, HEADS))
        return tuple(x.requires_grad_() for x in (q, k, *values))

    return make, lambda q, k, v, g, beta: gated_delta_rule(q, k, v, g, beta, chunks)


def convolution(lengths: Sequence[int]) -> tuple[Make, Callable[..., Tensor]]:
    """Return functions that make the inputs of the convolution, and that compute it. Args: tokens of each sequence."""
    place, width = positions(lengths, CPU), 3 * HEADS * CHANNELS

    def make() -> tuple[Tensor, ...]:
        return torch.randn(sum(lengths), width, requires_grad=True), torch.randn(width, WIDTH, requires_grad=True)

    return make, lambda x, weight: packed_convolution(x, weight, place)


def attention(lengths: Sequence[int]) -> tuple[Make, Callable[..., Tensor]]:
    """Return functions that make the inputs of attention, and that compute it. Args: equal tokens of each sequence."""

    def make() -> tuple[Tensor, ...]:
        heads = (ATTENTION_HEADS, 1, 1)
        return tuple(torch.randn(len(lengths), n, lengths[0], ATTENTION_CHANNELS, requires_grad=True) for n in heads)

    return make, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


OPERATORS = {"delta rule": delta_rule, "convolution": convolution, "attention": attention}


def measure(lengths: Sequence[int], repetitions: int) -> Row:
    """Return the microseconds per token of (forward, backward) of each operator."""
    made = {name: operator(lengths) for name, operator in OPERATORS.items()}
    calls = {}
    for name, (make, compute) in made.items():
        given = make()
        calls[f"{name} forward"] = partial(_forward, compute, given)
        calls[f"{name} both"] = partial(_both, compute, given)
    rounds = [{name: on_host(call, None)[1] for name, call in calls.items()} for _ in range(1 + repetitions)]
    micro = {name: 1e6 * min(taken[name] for taken in rounds[1:]) / sum(lengths) for name in calls}
    return {name: (micro[f"{name} forward"], micro[f"{name} both"] - micro[f"{name} forward"]) for name in OPERATORS}


def _forward(compute: Callable[..., Tensor], given: tuple[Tensor, ...], _: None) -> None:
    with torch.no_grad():
        compute(*given)


def _both(compute: Callable[..., Tensor], given: tuple[Tensor, ...], _: None) -> None:
    torch.autograd.grad(compute(*given).sum(), given)


def flatness(found: dict[tuple[int, ...], Row]) -> float:
    """Return the largest over the smallest cost of backward of the delta rule, over the single sequences."""
    backward = [row["delta rule"][1] for lengths, row in found.items() if len(lengths) == 1]
    return max(backward) / min(backward)


def markdown(found: dict[tuple[int, ...], Row]) -> str:
    """Return the page of results. Args: what `measure` returned, by lengths."""
    around = machine()
    lines = [
        "# Cost of the gated delta rule",
        "",
        f"`python -m benchmarks.linear_attention`, one thread of {around['cores']} cores ({around['cpu']}), at {commit()}.",
        "Microseconds of CPU time per token, forward / backward, in fp32, the least of several rounds. The delta rule has 8",
        "heads of 128, attention 4 heads of 256 and one key-value head. Projections are in neither. On a GPU nothing was",
        "measured.",
        "",
        "| sequences | gated delta rule | convolution | attention (SDPA) | delta rule and convolution over attention |",
        "| --- | --- | --- | --- | --- |",
    ]
    for lengths, row in found.items():
        name = f"{lengths[0]:,}" if len(lengths) == 1 else f"{len(lengths)} of {lengths[0]:,}"
        cells = [f"{forward:.0f} / {backward:.0f}" for forward, backward in row.values()]
        ratio = sum(row["delta rule"] + row["convolution"]) / sum(row["attention"])
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio:.2f} |")
    lines += [
        "",
        f"Over the single sequences, the backward pass of the delta rule costs the same per token within a factor of "
        f"{flatness(found):.2f}. The target is {TARGET}.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure, write the page, and return 0 if the target was met."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.linear_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="short sequences and one repetition, only to see that it runs")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help=f"the page to write (default: {OUT.relative_to(ROOT)})")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    quick: tuple[tuple[int, ...], ...] = ((128,), (256,), (64,) * 4)
    lengths = quick if args.quick else (*LENGTHS, *PACKED)
    found = {each: measure(each, 1 if args.quick else args.repetitions) for each in lengths}
    page = markdown(found)
    print(page)
    if args.out is not None or not args.quick:
        (args.out or OUT).write_text(page)
    return 0 if args.quick or flatness(found) <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
