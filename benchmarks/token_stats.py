"""Log-prob and entropy of the logits, forward and backward, on a CPU: ours beside TRL, verl and the plain formula.

    python -m benchmarks.token_stats [--peers DIR] [--quick] [--repetitions 9] [--json FILE]

All in one process and in turn. Peers that are not installed are left out; to put them elsewhere than into this environment:
`pip install --no-deps --target DIR trl verl`, then what their modules import (pandas, datasets, accelerate; ray, tensordict,
omegaconf). What is compared is their own PyTorch code for CPUs in bf16, as their trainers call it; their fused GPU kernels are
not. Backward begins with random gradients of all outputs and ends at the logits. U is the size of the logits in bf16.

Rows: memory (highest extra memory in U), moved (bytes that operators read from and write to memory, in U; a count), time
(seconds of both passes), time_logprob (where the entropy is a metric without a gradient), cpu_time and cpu_time_logprob (CPU
seconds of the process in the same runs: what to look at on a busy machine), error (against fp64 on the same logits),
collectives.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# threads that wait for each other sleep: on a busy machine, spinning ones would time the neighbours
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from benchmarks._measure import Times, bytes_moved, interleaved, load, peak_extra_bytes
from benchmarks._token_stats_peers import OURS, Statistics, alternatives, count_collectives

Row = dict[str, Any]
Inputs = tuple[Tensor, Tensor, Tensor]  # logits [R, V], not a leaf; labels [R]; gradients [2, R]
MEMORY_SHAPE, TIME_SHAPES, ERROR_SHAPE = (8192, 18992), ((256, 18992), (1024, 32000)), (64, 32000)


def inputs(shape: tuple[int, int], dtype: torch.dtype, shift: float = 0.0) -> Callable[[], Inputs]:
    """Makes fresh logits of the same values every time, as an output layer would: not a leaf, nobody else's."""
    generator = torch.Generator().manual_seed(0)
    source = (torch.randn(shape, generator=generator) * 3 + shift).to(dtype).requires_grad_()
    labels = torch.randint(0, shape[1], shape[:1], generator=generator)
    gradients = torch.randn(2, shape[0], generator=generator)
    return lambda: (source.clone(), labels, gradients)


def forward_backward(statistics: Statistics, given: Inputs, entropy_gradient: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob, entropy, gradient of the logits)."""
    logits, labels, gradients = given
    logprob, entropy = statistics(logits, labels)
    outputs = [logprob, entropy] if entropy_gradient else [logprob]
    upstream = [g.to(x.dtype) for g, x in zip(gradients, outputs, strict=False)]
    (gradient,) = torch.autograd.grad(outputs, logits, upstream)
    return logprob, entropy, gradient


def logprob_only(statistics: Statistics, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the entropy as a metric: computed, without a gradient."""

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logprob, entropy = statistics(x, y)
        return logprob, entropy.detach()

    return forward_backward(run, given, entropy_gradient=False)


def row(name: str, measured: dict[str, float], shape: tuple[int, int], dtype: str, **more: Any) -> Row:
    """One measure: our value, each peer's, and each peer's over ours."""
    peers = {k: v for k, v in measured.items() if k != OURS}
    ratio = {k: v / measured[OURS] if measured[OURS] else None for k, v in peers.items()}
    return {"id": name, "ours": measured[OURS], "peers": peers, "ratio": ratio, "shape": list(shape), "dtype": dtype} | more


def memory_rows(them: dict[str, Statistics], shape: tuple[int, int], dtype: torch.dtype) -> list[Row]:
    """Highest extra memory, and bytes moved, in U."""
    u = 2 * shape[0] * shape[1]
    prepare = inputs(shape, dtype)
    peak: dict[str, float] = {}
    moved: dict[str, float] = {}
    for name, statistics in them.items():
        given = prepare()
        run = functools.partial(forward_backward, statistics, given)
        counted: list[int] = []
        peak[name] = peak_extra_bytes(lambda: counted.append(bytes_moved(run))) / u  # noqa: B023
        moved[name] = counted[0] / u
    kind = str(dtype).removeprefix("torch.")
    return [row("token_stats/memory", peak, shape, kind, unit="U"), row("token_stats/moved", moved, shape, kind, unit="U")]


def time_rows(them: dict[str, Statistics], shape: tuple[int, int], threads: int, repetitions: int) -> list[Row]:
    """Seconds, all alternatives in turn; bf16 logits."""
    torch.set_num_threads(threads)
    rows = []
    for name, run in (("token_stats/time", forward_backward), ("token_stats/time_logprob", logprob_only)):
        calls = {k: (lambda given, s=s, run=run: run(s, given)) for k, s in them.items()}
        times: dict[str, Times] = interleaved(inputs(shape, torch.bfloat16), calls, repetitions)
        spread = {k: [t.low, t.high] for k, t in times.items()}
        more: Row = {"unit": "s", "threads": threads, "load": load()}
        rows.append(row(name, {k: t.wall for k, t in times.items()}, shape, "bfloat16", spread=spread, **more))
        cpu_name = name.replace("/", "/cpu_")
        rows.append(row(cpu_name, {k: t.cpu for k, t in times.items()}, shape, "bfloat16", **more))
    return rows


def error_rows(them: dict[str, Statistics], shape: tuple[int, int], dtype: torch.dtype, shift: float) -> list[Row]:
    """Largest error of log-prob and entropy (nats), and the gradient's relative error in the 2-norm, against fp64."""
    prepare = inputs(shape, dtype, shift)
    logits, labels, gradients = prepare()
    exact = logits.detach().double().requires_grad_()
    logp = torch.log_softmax(exact, dim=-1)
    truth = (logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1))
    (gradient,) = torch.autograd.grad(truth, exact, list(gradients.double()))
    errors: dict[str, dict[str, float]] = {"logprob": {}, "entropy": {}, "gradient": {}}
    for name, statistics in them.items():
        logprob, entropy, ours = forward_backward(statistics, prepare())
        errors["logprob"][name] = (logprob - truth[0]).abs().max().item()
        errors["entropy"][name] = (entropy - truth[1]).abs().max().item()
        errors["gradient"][name] = ((ours - gradient).norm() / gradient.norm()).item()
    kind = str(dtype).removeprefix("torch.")
    return [row(f"token_stats/error_{k}", v, shape, kind, shift=shift) for k, v in errors.items()]


def collective_rows(peers: Path | None) -> list[Row]:
    """Calls of collectives over two tensor-parallel ranks: forward, backward, and whether both ranks hold the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(count_collectives, (Path(folder), peers), nprocs=2)
        counted: dict[str, list[Any]] = json.loads((Path(folder) / "counted").read_text())
    rows = []
    for column, name in enumerate(("forward", "backward")):
        values = {who: float(counts[column]) for who, counts in counted.items()}
        rows.append(row(f"token_stats/collectives_{name}", values, (64, 1000), "float32", unit="calls"))
    same = {who: float(counts[2]) for who, counts in counted.items()}
    return [*rows, row("token_stats/same_bits_on_ranks", same, (64, 1000), "float32", unit="yes = 1")]


def measure(peers: Path | None = None, quick: bool = False, repetitions: int = 9) -> list[Row]:
    """All rows. quick: small shapes and few repetitions, to see that it runs."""
    them, versions = alternatives(peers)
    before = torch.get_num_threads()
    memory, times = ((512, 18992), ((64, 18992),)) if quick else (MEMORY_SHAPE, TIME_SHAPES)
    rows: list[Row] = []
    for dtype in (torch.bfloat16, torch.float32):
        rows += memory_rows(them, memory, dtype)
        for shift in (0.0, 100.0):
            rows += error_rows(them, ERROR_SHAPE, dtype, shift)
    for threads in (1, 2):
        for shape in times:
            rows += time_rows(them, shape, threads, 2 if quick else repetitions)
    torch.set_num_threads(before)
    rows += collective_rows(peers)
    return [r | {"versions": versions | {"torch": torch.__version__}} for r in rows]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="a folder with installed peers")
    parser.add_argument("--quick", action="store_true", help="small shapes, two repetitions")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    args = parser.parse_args()
    rows = measure(args.peers, args.quick, args.repetitions)
    print(", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items()), "|", load())
    print(f"{'measure':28}{'shape':>14} {'dtype':9}{'':12}{'ours':>10}" + "".join(f"{n:>22}" for n in rows[0]["peers"]))
    for r in rows:
        how = f"{r['threads']} threads" if "threads" in r else f"shift {r['shift']:g}" if "shift" in r else r["unit"]
        line = f"{r['id']:28}{'x'.join(map(str, r['shape'])):>14} {r['dtype']:9}{how:12}{r['ours']:10.3g}"
        print(line + "".join(f"{v:12.3g} ({_times(r['ratio'][n])})" for n, v in r["peers"].items()))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def _times(ratio: float | None) -> str:
    return f"{ratio:6.3g}x" if ratio else "      -"


if __name__ == "__main__":
    main()
