"""Measure the gain of `rollout.max_staleness: 1` if engine and trainer have a core each, the same ones in both runs.

    python -m benchmarks --only 13

Makes two runs of the demo (examples/demo.yaml, one rank, `training.epochs` set so that sampling and training take about as
long): one that samples and trains in turn, and one that samples one step ahead with truncated importance sampling. In both, the
server's threads are bound to core 0 and the trainer's to core 1, because two shared cores would be busy either way. The demo's
base model is made if it does not exist.

The figures are medians of the seconds of a step and of its phases, after the first steps, and the accuracies before and after.
A step ahead is compared with the sum of the sync and the longer of sampling (with grading) and training.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results import ROOT, Measure, SuiteOptions, Target
from tepo_megatron.monitor.sinks import read_metrics

ENGINE_CORE, TRAINER_CORE = 0, 1
STEPS, EPOCHS, WARM_UP = 40, 2, 3
TARGET = 1.15
PHASES = {
    "step": ("total",),
    "sampling": ("rollout", "grading_wait"),
    "training": ("old_stats", "reference", "update"),
    "sync": ("sync",),
}
RUNS = {
    "in turn": ["--rollout.max_staleness", "0"],
    "one step ahead": ["--rollout.max_staleness", "1", "--objective.correction", "tis"],
}


def measures(options: SuiteOptions) -> list[Measure]:
    """Make both runs and compare them."""
    name = "one step ahead, a core for each"
    if options.quick:
        return [Measure(13, name, "s", None, why="not measured: two runs of the demo are not quick")]
    base_model = ["-m", "examples.arithmetic.base_model", "--seed", "0", "--out", ".cache/demo/seed-0"]
    subprocess.run([sys.executable, *base_model], cwd=ROOT, check=True, stdout=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        runs = {run_name: run(Path(folder), words) for run_name, words in RUNS.items()}
    ahead = runs["one step ahead"]
    longer_phase = max(ahead["sampling"], ahead["training"]) + ahead["sync"]
    peers = {"longer phase + sync": longer_phase, "in turn": runs["in turn"]["step"]}
    return [Measure(13, name, "s", ahead["step"], peers, (Target("ours / longer phase + sync", "<=", TARGET),), more=runs)]


def run(folder: Path, words: list[str]) -> dict[str, float]:
    """Make one run; return the medians of its steps in seconds, and its accuracies."""
    command = [str(Path(sys.executable).with_name("tepo")), "train", "examples/demo.yaml", "--name", "run"]
    command += ["--overwrite", "true", "--output", str(folder), "--parallel.tp", "1", "--training.steps", str(STEPS)]
    command += ["--training.epochs", str(EPOCHS), "--rollout.filter_uniform_groups", "false", *words]
    trainer = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
    over = threading.Event()
    binding = threading.Thread(target=bind_all, args=(psutil.Process(trainer.pid), over))
    binding.start()
    status = trainer.wait()
    over.set()
    binding.join()
    if status:
        raise SystemExit(f"the run {' '.join(words)} ended with status {status}")
    records: list[Any] = read_metrics(folder / "run")[WARM_UP:]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    medians = {
        name: statistics.median(sum(r.get(f"seconds/{phase}", 0.0) for phase in phases) for r in records)
        for name, phases in PHASES.items()
    }
    accuracies = {"before": summary["accuracy_before"], "after": summary["accuracy_after"]}
    return medians | accuracies | {"standard_error": summary["standard_error"]["after"]}


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
