"""Measure the gain of `rollout.max_staleness: 1` if engine and trainer have a core each, the same ones in both runs.

    python -m benchmarks.overlap [--steps 40] [--json FILE]

Makes two runs of the demo (examples/demo.yaml, one rank, `training.epochs` set so that sampling and training take about as
long): one that samples and trains in turn, and one that samples one step ahead with truncated importance sampling. In both, the
server's threads are bound to core 0 and the trainer's to core 1, because two shared cores would be busy either way. The demo's
base model is made if it does not exist.

Prints medians of the seconds of a step and of its phases, after the first steps, and the accuracies before and after. Target: a
step ahead takes at most 1.15 times the sum of the sync and the longer of sampling (with grading) and training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tepo_megatron.observability.sinks import read_metrics

ROOT = Path(__file__).resolve().parents[1]
ENGINE_CORE, TRAINER_CORE = 0, 1
WARM_UP = 3  # steps
TARGET = 1.15
SAMPLING, TRAINING = ("rollout", "grading_wait"), ("old_stats", "update")


def main() -> None:
    """Make both runs and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    base_model = ["-m", "examples.arithmetic.base_model", "--seed", "0", "--out", ".cache/demo/seed-0"]
    subprocess.run([sys.executable, *base_model], cwd=ROOT, check=True, stdout=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        found = {name: run(Path(folder), name, args.steps, args.epochs, words) for name, words in RUNS.items()}
    for name, r in found.items():
        print(
            f"{name}: {r['step']:.3f} s a step; sampling {r['sampling']:.3f}, training {r['training']:.3f}, "
            f"sync {r['sync']:.3f}; accuracy {r['before']:.3f} -> {r['after']:.3f} ± {r['standard_error']:.3f}"
        )
    ahead = found["one step ahead"]
    print(f"one step ahead: {ahead['step'] / longest(ahead):.2f} of the longer phase and the sync (target {TARGET})")
    print(f"in turn / one step ahead: {found['in turn']['step'] / ahead['step']:.2f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def longest(found: Mapping[str, float]) -> float:
    """Return the seconds of the longer of both phases, plus the sync."""
    return max(found["sampling"], found["training"]) + found["sync"]


RUNS = {
    "in turn": ["--rollout.max_staleness", "0"],
    "one step ahead": ["--rollout.max_staleness", "1", "--objective.correction", "tis"],
}


def run(folder: Path, name: str, steps: int, epochs: int, words: list[str]) -> dict[str, float]:
    """Make one run; return the medians of its steps in seconds, and its accuracies."""
    command = [
        str(Path(sys.executable).with_name("tepo")),
        "train",
        "examples/demo.yaml",
        "--name",
        "run",
        "--overwrite",
        "true",
    ]
    command += ["--output", str(folder), "--parallel.tp", "1", "--training.steps", str(steps)]
    command += ["--training.epochs", str(epochs), "--rollout.filter_uniform_groups", "false", *words]
    trainer = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
    over = threading.Event()
    binding = threading.Thread(target=bind_all, args=(psutil.Process(trainer.pid), over))
    binding.start()
    status = trainer.wait()
    over.set()
    binding.join()
    if status:
        raise SystemExit(f"the run {name} ended with status {status}")
    records: list[Any] = read_metrics(folder / "run")[WARM_UP:]
    summary = json.loads((folder / "run" / "summary.json").read_text())

    def median(*phases: str) -> float:
        return statistics.median(sum(r.get(f"seconds/{phase}", 0.0) for phase in phases) for r in records)

    return {
        "step": median("total"),
        "sampling": median(*SAMPLING),
        "training": median(*TRAINING),
        "sync": median("sync"),
        "before": summary["accuracy_before"],
        "after": summary["accuracy_after"],
        "standard_error": summary["standard_error"]["after"],
    }


def bind_all(trainer: psutil.Process, over: threading.Event) -> None:
    """Keep binding every thread of the server and its children to one core and all others to the other, new ones too."""
    while not over.wait(0.5):
        try:
            processes = [trainer, *trainer.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            bind(process)


def bind(process: psutil.Process) -> None:
    """Bind the threads of one process to its core."""
    try:
        line = " ".join(process.cmdline())
        core = ENGINE_CORE if "servers.guard" in line or "vllm" in line or "VLLM" in line else TRAINER_CORE
        for thread in process.threads():
            if os.sched_getaffinity(thread.id) != {core}:
                os.sched_setaffinity(thread.id, {core})
    except (psutil.Error, ProcessLookupError):
        return


if __name__ == "__main__":
    main()
