"""Measure the gain of three optimizations of the training step: the step with all of them next to the step without one.

    python -m benchmarks.optimizations [--quick] [--repetitions 9] [--model demo|100m] [--json FILE]

The steps of `benchmarks.step`, one rank, one thread, in processes that take turns. No prompt is shared, since Megatron-Core's
own rotary embedding starts every sequence at 0. All compute the same losses and gradient norms, or it raises AssertionError.
Printed: median seconds with the 20th and 80th percentile, and the ratio of each to the step with all optimizations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import _step_cases as cases
from benchmarks import step
from benchmarks._measure import load
from benchmarks._optimizations import OPTIMIZATIONS
from benchmarks._step_workers import started

WITH_ALL = "with all"


def measure(repetitions: int = 9, quick: bool = False, case: str = "demo") -> dict[str, Any]:
    """Return seconds by the optimization that is left out, and ratios. Raises AssertionError if the results differ."""
    samples: dict[str, list[float]] = {name: [] for name in (WITH_ALL, *OPTIMIZATIONS)}
    repetitions = 2 if quick else repetitions
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cases.write_model(case, Path(folder))
        workers = {
            name: stack.enter_context(started("tp1", case, Path(folder), name if name in OPTIMIZATIONS else None, "never"))
            for name in samples
        }
        for worker in workers.values():
            worker.ready()
        names = list(samples)
        for turn in range(repetitions + 1):  # the first round warms up
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds = workers[name].step(threads=1)
                if turn:
                    samples[name].append(seconds)
        found = {name: step.disagreement(workers[name].updates, workers[WITH_ALL].updates) for name in OPTIMIZATIONS}
    assert max(found.values()) <= step.AGREE, f"losses and gradient norms differ: {found}"
    whole = statistics.median(samples[WITH_ALL])
    return {
        "id": f"optimizations/{case}", "load": load(), "repetitions": repetitions, "disagreement": found,
        "seconds": {name: step.spread(s) for name, s in samples.items()},
        "ratio": {name: statistics.median(samples[name]) / whole for name in OPTIMIZATIONS},
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two repetitions: to see that it runs")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--model", choices=cases.CASES, default="demo")
    args = parser.parse_args()
    result = measure(args.repetitions, args.quick, args.model)
    worst = max(result["disagreement"].values())
    print(f"{result['load']}; {result['repetitions']} repetitions; results differ by {worst:.1e}")
    for name, (median, low, high) in result["seconds"].items():
        whose = f"without: {name}" if name in OPTIMIZATIONS else name
        ratio = f"  {result['ratio'][name]:.2f}x" if name in OPTIMIZATIONS else ""
        print(f"{whose:46}{median * 1e3:8.1f} ms  [{low * 1e3:.1f}, {high * 1e3:.1f}]{ratio}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
