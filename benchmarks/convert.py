"""Measure the speed of `tools/convert.py` against copying the same files, and its memory.

    python benchmarks/convert.py [--quick | --shapes qwen3-14b --layers 8] [--repetitions 5] [--folder DIR]

Makes a random Qwen3 of one billion parameters (bf16, 2 GB in five files), then repeats, in turn: copy the directory and sync
each file, import it, export it. All files are in the page cache when they are read (warm) and on the disk when a time ends.
Before each run, the output of the same kind from the round before is removed and synced, and as much time passes as a
conversion's process takes to start. So every kind fills as many pages that have been free for equally long. (The host of a
virtual machine takes back pages that are free for some seconds, and the next use of one takes up to five times as long.) A
conversion's time is the one that the tool prints: from the checks of the input to the finished directory, without the start of
Python, torch and Megatron-Core (given separately). Memory is the peak resident set of the converting process, with mapped
files. At the end the exported directory is compared with the first one, bit by bit. `--shapes qwen3-14b` takes the sizes of
that model, 29.5 GB with its 40 layers. Four directories of the model's size are on the disk at once.
"""

from __future__ import annotations

import argparse
import json
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

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 14, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": True,
}  # fmt: skip
QUICK = CONFIG | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}
LARGE = CONFIG | {
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
FILE_BYTES = 512 * 10**6
TARGET_SPEED, TARGET_MEMORY = 0.6, 2**31  # of memory: a file of 1 GiB, and the program


@dataclass(frozen=True)
class MeasuredConversion:
    """One timed run.

    Attributes:
        startup: Seconds of the process before the work.
        peak: Peak resident set in bytes.
    """

    seconds: float
    startup: float = 0.0
    peak: int = 0


def make_model(folder: Path, config: dict[str, object]) -> None:
    """Write random weights below 2 in magnitude, in files of half a gigabyte."""
    import torch
    from safetensors.torch import save_file

    from tepo_megatron.weights.families import find_family

    arch = find_family(config).architecture(config)
    heads, groups, d, h, f = arch.num_heads, arch.num_query_groups, arch.head_dim, arch.hidden_size, arch.ffn_size
    shapes = {
        "q_proj": (heads * d, h), "k_proj": (groups * d, h), "v_proj": (groups * d, h), "o_proj": (h, heads * d),
        "gate_proj": (f, h), "up_proj": (f, h), "down_proj": (h, f), "q_norm": (d,), "k_norm": (d,),
        "embed_tokens": (arch.vocab_size, h), "lm_head": (arch.vocab_size, h),
    }  # fmt: skip
    folder.mkdir(parents=True)
    files: dict[str, list[str]] = {}
    bucket: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(files):05d}.safetensors"
        files[name] = list(bucket)
        save_file(bucket, folder / name, {"format": "pt"})
        bucket.clear()

    for name in sorted(find_family(config).tensor_names(arch)):
        if sum(t.nbytes for t in bucket.values()) >= FILE_BYTES:
            flush()
        bits = torch.empty(shapes.get(name.split(".")[-2], (h,)), dtype=torch.int16).random_(-(2**15), 2**15)
        bucket[name] = bits.bitwise_and_(~0x4000).view(torch.bfloat16)
    flush()
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


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


def largest_group(source: Path, config: dict[str, object]) -> int:
    """Return the bytes of the largest tensors that become one parameter: the embedding, or gate and up projection."""
    h, f, v = (int(str(config[k])) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    return 2 * max(v * h, 2 * f * h)


def measure(source: Path, folder: Path, repetitions: int) -> dict[str, list[MeasuredConversion]]:
    """Return the runs of each kind, made in turn. A first round warms up; with 0 repetitions it is the only one, and counts."""
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
            if repetition or not repetitions:
                runs[kind].append(done)
    return runs


def differing(one: Path, other: Path) -> list[str]:
    """Return the names of tensors that are not the same bits in both Hugging Face directories."""
    from safetensors import safe_open

    def places(folder: Path) -> dict[str, Path]:
        return {name: path for path in folder.glob("*.safetensors") for name in safe_open(path, "pt").offset_keys()}

    def same(name: str) -> bool:
        a, b = (safe_open(there[name], "pt").get_tensor(name) for there in (ours, theirs))
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a.view(torch.int16) == b.view(torch.int16)).all())

    import torch

    ours, theirs = places(one), places(other)
    return sorted(ours.keys() ^ theirs.keys()) + sorted(name for name in ours.keys() & theirs.keys() if not same(name))


def report(runs: dict[str, list[MeasuredConversion]], nbytes: int, group: int) -> None:
    """Print medians with their ranges, and compare them with the targets."""
    base = statistics.median(r.seconds for r in runs["copy"])
    print(f"{nbytes / 1e9:.2f} GB, {len(runs['copy'])} repetitions, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, each in runs.items():
        seconds = [r.seconds for r in each]
        middle = statistics.median(seconds)
        line = f"{name:7s} {middle:6.2f} s ({min(seconds):.2f} to {max(seconds):.2f})  {nbytes / 1e9 / middle:5.2f} GB/s"
        if name != "copy":
            paired = statistics.median(c.seconds / r.seconds for c, r in zip(runs["copy"], each, strict=True))
            peak = max(r.peak for r in each)
            fast = "met" if paired >= TARGET_SPEED else "MISSED"
            small = "met" if peak <= group + TARGET_MEMORY else "MISSED"
            line += f"  {base / middle:4.0%} of copying, {paired:.0%} round by round (target {TARGET_SPEED:.0%}: {fast})"
            line += f"  peak {peak / 2**30:.2f} GiB (target {(group + TARGET_MEMORY) / 2**30:.2f}: {small})"
            line += f"  start {statistics.median(r.startup for r in each):.1f} s"
        print(line)


def main() -> None:
    """Make the model, measure, print, and compare the exported model with the original."""
    parser = argparse.ArgumentParser(description="tools/convert.py against copying")
    parser.add_argument("--quick", action="store_true", help="a model of a few megabytes, to see that it runs")
    parser.add_argument("--shapes", choices=["qwen3-14b"], help="the sizes of a published model")
    parser.add_argument("--layers", type=int, help="with --shapes: number of layers, the first of the model")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", help="where to work (8 GB, removed afterwards); default: the system's temporary folder")
    parser.add_argument(
        "--make", type=Path, help=argparse.SUPPRESS
    )  # in a process of its own, so that its memory is not counted
    args = parser.parse_args()
    config = QUICK if args.quick else LARGE if args.shapes else CONFIG
    if args.layers is not None:
        config = config | {"num_hidden_layers": args.layers}
    if args.make:
        make_model(args.make, config)
        return
    with tempfile.TemporaryDirectory(prefix="convert-", dir=args.folder) as name:
        folder, source = Path(name), Path(name) / "hf"
        again = [sys.executable, __file__, "--make", str(source), *sys.argv[1:]]
        subprocess.run(again, check=True)
        nbytes = sum(p.stat().st_size for p in source.iterdir())
        report(measure(source, folder, args.repetitions), nbytes, largest_group(source, config))
        wrong = differing(source, folder / "exported")
        print(f"there and back: {'the same bits' if not wrong else f'{len(wrong)} tensors differ: {wrong[:3]}'}")
        if wrong:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
