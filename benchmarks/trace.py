"""Measure what traces cost: CPU seconds of steps with and without, and of a call while no step is traced.

    python -m benchmarks.trace MODEL [--steps 80]

Runs the demo (examples/demo.yaml) on the model folder that `examples.arithmetic.base_model` builds, and traces every second
step. The CPU seconds of a step are those of all processes of the run (ranks, service, graders, server), from the end of the
step before to its own end: its line in the metrics and, if it is traced, its trace. So a traced step includes the merge.
Both kinds of steps alternate in one run, because the CPU seconds of the same step differ by some percent from run to run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tepo_megatron.launcher.trace_request import read_trace
from tepo_megatron.observability.trace_file import TRACES, trace_path
from tepo_megatron.observability.tracer import Tracer

LIMIT_SECONDS = 1500.0  # for a run
WARM = 4  # steps that are not measured
EVERY = 2
_POLL_SECONDS = 0.002


def main() -> None:
    """Make the run and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    print(
        f"a span while no step is traced: {off_seconds() * 1e9:.0f} ns; while one is: {on_seconds() * 1e9:.0f} ns", flush=True
    )
    seconds = step_seconds(args.model, args.steps)
    # a traced step next to the mean of its neighbours, so that what the steps learn does not count
    ratios = [
        2 * seconds[step] / (seconds[step - 1] + seconds[step + 1])
        for step in range(WARM + EVERY, args.steps - 1)
        if step % EVERY == 0
    ]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    plain = statistics.mean(seconds[step] for step in range(WARM + 1, args.steps) if step % EVERY)
    print(f"CPU seconds of a step without a trace: {plain:.3f}; with one: {statistics.mean(ratios) - 1:+.1%} +- {error:.1%}")
    print(f"median: {statistics.median(ratios) - 1:+.1%}, of {len(ratios)} traced steps")


def off_seconds(calls: int = 200_000) -> float:
    """Return the seconds of an empty span while no step is traced."""
    return _seconds(Tracer(), calls)


def on_seconds(calls: int = 200_000) -> float:
    """Return the same while a step is traced."""
    tracer = Tracer()
    tracer.begin()
    return _seconds(tracer, calls)


def _seconds(tracer: Tracer, calls: int) -> float:
    begun = time.process_time()
    for _ in range(calls):
        with tracer.span("span", size=1):
            pass
    return (time.process_time() - begun) / calls


def step_seconds(model: Path, steps: int) -> dict[int, float]:
    """Run the demo and return the CPU seconds of each step, all processes together."""
    with tempfile.TemporaryDirectory() as output:
        run = Path(output) / "run"
        words = [sys.executable, "-m", "tepo_megatron", "train", "examples/demo.yaml", "--name", "run", "--output", output]
        words += ["--model.path", str(model), "--data.train", str(model / "train.jsonl")]
        words += ["--data.eval", str(model / "eval.jsonl"), "--logging.noise_floor_every", "0"]
        words += ["--logging.trace_every", str(EVERY), "--training.steps", str(steps), "--export_hf", "false"]
        process, deadline = subprocess.Popen(words, stdout=subprocess.DEVNULL), time.monotonic() + LIMIT_SECONDS
        ends: dict[int, float] = {}
        try:
            for step in range(1, steps + 1):
                while _newest(run) < step or (step % EVERY == 0 and not trace_path(run, step).exists()):
                    if time.monotonic() > deadline or process.poll() is not None:
                        raise SystemExit(f"the run did not take {steps} steps; status {process.poll()}")
                    time.sleep(_POLL_SECONDS)
                ends[step] = _family_seconds(process.pid)
            spans = sum(event["ph"] == "X" for event in read_trace(trace_path(run, EVERY * 2))["traceEvents"])
            sizes = [path.stat().st_size for path in (run / TRACES).iterdir()]
            print(f"a trace: {spans} spans, {statistics.mean(sizes) / 1024:.0f} KiB")
            process.wait(max(1.0, deadline - time.monotonic()))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    return {step: ends[step] - ends[step - 1] for step in range(2, steps + 1)}


def _newest(run: Path) -> int:
    """Return the newest step in the metrics; 0 without any."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _family_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of all its descendants, also of those that have ended."""
    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


if __name__ == "__main__":
    main()
