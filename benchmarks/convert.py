"""Measure the speed of `tools/convert.py` against copying the same files, and its memory.

    python -m benchmarks --only 10

Makes a random Qwen3 of one billion parameters (bf16, 2 GB), then repeats, in turn: copy the directory and sync each file,
import it, export it. All files are in the page cache when they are read (warm) and on the disk when a time ends. Before each
run, the output of the same kind from the round before is removed and synced, and as much time passes as a conversion's process
takes to start. So every kind fills as many pages that have been free for equally long. (The host of a virtual machine takes
back pages that are free for some seconds, and the next use of one takes up to five times as long.) A conversion's time is the
one that the tool prints: from the checks of the input to the finished directory, without the start of Python, torch and
Megatron-Core. Memory is the peak resident set of the converting process, with mapped files.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks._weights import write_model
from benchmarks.results import OURS, ROOT, Measure, SuiteOptions, Target

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 14, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
QUICK = SHAPE | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}
TARGET_SPEED, TARGET_MEMORY = 0.6, 2**31  # of memory: a file of 1 GiB, and the program, beyond the largest parameter


@dataclass(frozen=True)
class MeasuredConversion:
    """One timed run; `startup` are the seconds of the process before the work, `peak` its peak resident set in bytes."""

    seconds: float
    startup: float = 0.0
    peak: int = 0


def copy(source: Path, out: Path) -> MeasuredConversion:
    """Copy a directory and sync its files; the reference of the conversions."""
    start = time.perf_counter()
    shutil.copytree(source, out)
    for path in (*out.iterdir(), out):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return MeasuredConversion(time.perf_counter() - start)


# A process counts the memory of the process that started it among its own peak until it runs its program. So a small process
# starts the one that is measured.
_MEASURE = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, flush=True)
sys.exit(status)
"""


def convert(*words: str) -> MeasuredConversion:
    """Run the tool in a process of its own."""
    start = time.perf_counter()
    command = [sys.executable, "-S", "-c", _MEASURE, sys.executable, str(ROOT / "tools/convert.py"), *words]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    text, _, peak = process.stdout.rpartition("peak ")
    printed = re.search(r"GB in ([\d.]+) s", text)
    if process.returncode or printed is None:
        raise SystemExit(f"convert.py {' '.join(words)} failed with status {process.returncode}:\n{text}")
    seconds = float(printed[1])
    return MeasuredConversion(seconds, time.perf_counter() - start - seconds, int(peak) * 1024)


def measure(source: Path, folder: Path, repetitions: int) -> dict[str, list[MeasuredConversion]]:
    """Return the runs of each kind, made in turn, after a first round that warms up."""
    copied, megatron, exported = (folder / name for name in ("copied", "megatron", "exported"))
    kinds: dict[str, tuple[Path, Callable[[], MeasuredConversion]]] = {
        "copy": (copied, lambda: copy(source, copied)),
        "import": (megatron, lambda: convert("import", "--hf", str(source), "--out", str(megatron))),
        "export": (exported, lambda: convert("export", "--megatron", str(megatron), "--out", str(exported))),
    }
    runs: dict[str, list[MeasuredConversion]] = {kind: [] for kind in kinds}
    startup = 0.0  # seconds, of the last conversion
    for repetition in range(repetitions + 1):
        for kind, (out, run) in kinds.items():
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            if kind == "copy":
                time.sleep(startup)
            done = run()
            startup = done.startup
            if repetition:
                runs[kind].append(done)
    return runs


def measures(options: SuiteOptions) -> list[Measure]:
    """Measure the speed of import and export relative to copying the same files, and their peak memory."""
    shape = QUICK if options.quick else SHAPE
    # the largest tensors that become one parameter: the embedding, or gate and up projection
    group = 2 * shape["hidden_size"] * max(shape["vocab_size"], 2 * shape["intermediate_size"])
    bound = round((group + TARGET_MEMORY) / 2**30, 2)
    with tempfile.TemporaryDirectory(prefix="convert-") as folder:
        source = write_model(shape, Path(folder), torch.bfloat16)
        size = sum(path.stat().st_size for path in source.iterdir())
        runs = measure(source, Path(folder), 1 if options.quick else 3)
    found = []
    for job in ("import", "export"):
        # paired by round, because the disk's speed changes between rounds
        share = statistics.median(c.seconds / r.seconds for c, r in zip(runs["copy"], runs[job], strict=True))
        what, more = f"{job} of {size / 1e9:.3g} GB", {"seconds": {k: [run.seconds for run in v] for k, v in runs.items()}}
        speed = () if options.quick else (Target(OURS, ">=", TARGET_SPEED),)
        found.append(Measure(10, f"{what}, speed", "of copying", share, {}, speed, higher_is_better=True, more=more))
        peak = max(run.peak for run in runs[job]) / 2**30
        found.append(Measure(10, f"{what}, peak memory", "GiB", peak, {}, (Target(OURS, "<=", bound),)))
    return found
