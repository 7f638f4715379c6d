"""Measure the demo's training step, without generation: ours on Megatron-Core next to the same step in plain PyTorch.

    python -m benchmarks.step [--quick] [--repetitions 9] [--json FILE]

A step of examples/demo.yaml: 32 problems x 8 samples of examples/arithmetic, old statistics of all of them, then 4 updates with
the `tepo` objective. Both sides begin with the rollouts on the host and end with the last update's
loss and gradient norm on the host. The noise floor of dH, which the demo measures in 2 of its 40 steps, is left out.

    tp1, tp2        Actor.attach_old_stats, mismatch and update, on one rank and on two tensor-parallel ranks
    plain padded    one process: transformers' Qwen3 (SDPA), fused AdamW, the loss from the formulas; minibatches padded to a
                    rectangle; like ours, only response rows reach the output layer
    plain bucketed  the same with several rectangles of sequences of similar length
    plain packed    the same with all in one row, the sequences separated by a mask

Each is a process (tp2: two) that waits while the others have their turn. Equal work is checked: loss and gradient norm of every
update must agree, or it raises AssertionError. Printed: median seconds, the 20th and 80th percentile, and the ratio of ours to
the fastest plain form with as many threads in all (tp2: two).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# For the workers, before they load torch: waiting threads release their core after a few microseconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from transformers.utils.logging import disable_progress_bar

from benchmarks import _step_cases as cases
from benchmarks._measure import load
from benchmarks._plain_step import FORMS
from benchmarks._step_workers import WORKERS, Updates, started

TARGET = 1.3  # tp1 over the fastest plain form, equal threads
AGREE = 1e-4  # relative, of loss and gradient norm
CHECKED_STEPS = 3  # Adam also scales up gradients that are rounding noise; the differences grow in later steps


def disagreement(ours: list[Updates], plain: list[Updates]) -> float:
    """Return the largest relative difference of a loss or a gradient norm in the first CHECKED_STEPS steps."""
    pairs = zip(
        (x for step in ours[:CHECKED_STEPS] for x in step), (x for step in plain[:CHECKED_STEPS] for x in step), strict=True
    )
    return max(abs(a - b) / abs(b) if b else math.inf for x, y in pairs for a, b in zip(x, y, strict=True))


def measure(repetitions: int = 9, quick: bool = False) -> dict[str, Any]:
    """Return seconds by worker and threads, ratios, and how well the results agree.

    Raises:
        AssertionError: The sides do not compute the same.
    """
    names = [n for n in WORKERS if not (quick and n == "tp2")]
    threads_of = {n: (1,) if quick or n == "tp2" else (1, 2) for n in names}
    samples: dict[tuple[str, int], list[float]] = {(n, t): [] for n in names for t in threads_of[n]}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        disable_progress_bar()
        cases.write_model(Path(folder))
        workers = {n: stack.enter_context(started(n, Path(folder))) for n in names}
        for worker in workers.values():
            worker.ready()
        for turn in range((2 if quick else repetitions) + 1):  # the first round warms up
            order = list(samples)
            for name, threads in order[turn % len(order) :] + order[: turn % len(order)]:
                seconds = workers[name].step(threads)
                if turn:
                    samples[name, threads].append(seconds)
        found = {n: disagreement(workers[n].updates, workers["plain padded"].updates) for n in names}
    worst = max(found.values())
    assert worst <= AGREE, f"losses and gradient norms differ: {found}"
    median = {key: statistics.median(s) for key, s in samples.items()}
    best = {t: min(median[f"plain {form}", t] for form in FORMS) for t in threads_of["tp1"]}
    ratio = {f"tp1 {t} threads": median["tp1", t] / best[t] for t in threads_of["tp1"]}
    if "tp2" in names:
        ratio["tp2 2 threads"] = median["tp2", 1] / best[2]
    return {
        "id": "step/demo", "target": TARGET, "ratio": ratio, "disagreement": found, "load": load(),
        "repetitions": 2 if quick else repetitions,
        "seconds": {f"{n} {t} threads": spread(s) for (n, t), s in samples.items()},
    }  # fmt: skip


def spread(samples: list[float]) -> list[float]:
    """Return [median, 20th percentile, 80th percentile]."""
    ordered = sorted(samples)
    return [statistics.median(ordered), *(ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one thread, no tp2, two repetitions: to see that it runs")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args()
    result = measure(args.repetitions, args.quick)
    print(
        f"{result['load']}; {result['repetitions']} repetitions; results differ by {max(result['disagreement'].values()):.1e}"
    )
    for name, (median, low, high) in result["seconds"].items():
        print(f"{name:24}{median * 1e3:8.1f} ms  [{low * 1e3:.1f}, {high * 1e3:.1f}]")
    for name, ratio in result["ratio"].items():
        print(f"{name:24}{ratio:8.2f} times plain (target for tp1: {TARGET})")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
