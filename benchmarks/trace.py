"""Measure what traces cost: CPU seconds of a step with and without, and of a call while no step is traced.

    python -m benchmarks.trace MODEL [--steps 30] [--rounds 2]

Runs the demo (examples/demo.yaml) on the model folder that `examples.arithmetic.base_model` builds, in turn without traces and
with a trace of every step. The CPU seconds are those of all processes of the run (ranks, service, graders, server), from the
end of step 3 to the end of the last step. Writing and merging the traces is part of them. Both runs sample the same tokens.
"""

from __future__ import annotations

import argparse
import json
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

LIMIT_SECONDS = 900.0  # for a run
WARM = 3  # steps that are not measured
_POLL_SECONDS = 0.02


def main() -> None:
    """Make the runs and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    print(f"a span while no step is traced: {off_seconds() * 1e9:.0f} ns; while one is: {on_seconds() * 1e9:.0f} ns")
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(args.rounds):
        for every in seconds:
            seconds[every].append(cpu_seconds(args.model, args.steps, every))
    plain, traced = (statistics.mean(seconds[every]) for every in (0, 1))
    print(f"CPU seconds of a step: {plain:.3f} without, {traced:.3f} with a trace: {traced / plain - 1:+.1%}")
    print("of each run:", ", ".join(f"{a:.3f} -> {b:.3f}" for a, b in zip(seconds[0], seconds[1], strict=True)))


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


def cpu_seconds(model: Path, steps: int, every: int) -> float:
    """Run the demo and return the CPU seconds of one step, all processes together.

    Args:
        model: Folder of the base model.
        steps: Number of steps.
        every: `logging.trace_every`.
    """
    with tempfile.TemporaryDirectory() as output:
        run = Path(output) / "run"
        words = [sys.executable, "-m", "tepo_megatron", "train", "examples/demo.yaml", "--name", "run", "--output", output]
        words += [
            "--model.path",
            str(model),
            "--data.train",
            str(model / "train.jsonl"),
            "--data.eval",
            str(model / "eval.jsonl"),
        ]
        words += ["--logging.trace_every", str(every), "--training.steps", str(steps), "--export_hf", "false"]
        process, deadline = subprocess.Popen(words, stdout=subprocess.DEVNULL), time.monotonic() + LIMIT_SECONDS
        marks: dict[int, float] = {}
        try:
            while steps not in marks:
                if time.monotonic() > deadline or process.poll() not in (None, 0):
                    raise SystemExit(f"the run did not take {steps} steps; status {process.poll()}")
                newest = _newest(run)
                if newest >= WARM and newest not in marks:
                    marks[newest] = _family_seconds(process.pid)
                time.sleep(_POLL_SECONDS)
            if process.wait(max(1.0, deadline - time.monotonic())):
                raise SystemExit("the run failed")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
        if every:
            spans = sum(event["ph"] == "X" for event in read_trace(trace_path(run, steps))["traceEvents"])
            size = sum(path.stat().st_size for path in (run / TRACES).iterdir())
            print(f"a trace: {spans} spans, {size / steps / 1024:.0f} KiB")
    return (marks[steps] - marks[min(marks)]) / (steps - min(marks))


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
