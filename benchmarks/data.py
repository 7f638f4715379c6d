"""Measure the time and memory to load a dataset that repeats itself, from each kind of file.

    python -m benchmarks.data [--rows 1800000] [--unique 17000] [--json FILE]

Generates verl's schema as DAPO-Math-17k has it (1.8 million rows of 17 thousand problems, about 800 bytes a row): as parquet,
as JSON lines whose copies are the same to the byte, and as JSON lines whose copies differ in a column, so that each is parsed.
Nine of ten answers are integers; the others are fractions and, 2 of 100, polynomials, which go to the grader's processes. Each
file is loaded as a run does it (`load_data`: deduplicated, answers tried, chat template, tokens) in a process of its own.

Prints seconds, CPU seconds of the process and its peak memory, including all that it imports. Targets: 60 s and 2 GiB. Exit
status 1 if one is missed. Needs 4 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS, GIB = 60.0, 2.0  # targets
KINDS = ("parquet", "jsonl, same copies", "jsonl, copies that differ")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("let the sum", "of all", "integers $n$", "such that", "$f(x)=x^2+3$", "and", "triangle ABC", "has area", "find")


def main() -> None:
    """Make the files, load each in a process of its own, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_800_000)
    parser.add_argument("--unique", type=int, default=17_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)  # internal: file, tokenizer's folder
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(*args.load)))
        return
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="data-") as folder:
        problems = list(make_problems(args.unique))
        write_tokenizer(Path(folder) / "model", [p["prompt"][0]["content"] for p in problems[:2000]])
        for kind in KINDS:
            file = write(Path(folder), kind, problems, args.rows)
            command = [sys.executable, "-m", "benchmarks.data", "--load", str(file), str(Path(folder) / "model")]
            found[kind] = {"bytes": file.stat().st_size} | json.loads(
                subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
            )
            file.unlink()
            report(kind, found[kind])
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if any(r["prompts"] != args.unique or r["seconds"] > SECONDS or r["peak_gib"] > GIB for r in found.values()):
        sys.exit("a target was missed")


def report(kind: str, r: dict[str, Any]) -> None:
    """Print the result of one kind of file.

    Args:
        r: The result of `load`, and the file's `bytes`.
    """
    print(
        f"{kind}: {r['bytes'] / 2**20:.0f} MiB; {r['seconds']:.1f} s (CPU {r['cpu_seconds']:.1f}; target {SECONDS:g}), peak "
        f"{r['peak_gib']:.2f} GiB (target {GIB:g}; {r['imports_gib']:.2f} before loading); {r['log']}",
        flush=True,
    )


def load(file: str, model: str) -> dict[str, Any]:
    """Load the data as a run does at its start; return the measurements."""
    from tepo_megatron.config import DataConfig, RewardConfig
    from tepo_megatron.data import load_data, load_tokenizer

    tokenizer = load_tokenizer(model)
    before = peak_gib()
    start, cpu = time.monotonic(), time.process_time()
    data = load_data(DataConfig(train=file), RewardConfig(), tokenizer)
    return {
        "seconds": time.monotonic() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_gib": peak_gib(),
        "imports_gib": before,
        "prompts": data.count,
        "tokens": sum(len(p.token_ids) for prompts, _ in data.train for p in prompts),
        "log": "; ".join(line.removeprefix(f"{file}: ") for line in data.log_lines),
    }


def peak_gib() -> float:
    """Return the peak memory of this process in GiB."""
    import torch

    from tepo_megatron.platform import memory

    return memory.usage(torch.device("cpu")).peak / 2**30


def make_problems(count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` different rows."""
    draw = random.Random(0)
    for i in range(count):
        text = " ".join(draw.choices(WORDS, k=draw.randint(20, 80)))
        content = f"Solve the following math problem step by step.\n\nProblem {i}: {text}\n\nRemember to box your answer."
        kind = draw.random()
        answer = f"x^2+{i}x-1" if kind < 0.02 else f"\\frac{{{i}}}{{{i + 7}}}" if kind < 0.1 else str(draw.randrange(10**4))
        yield {
            "data_source": "math_dapo",
            "prompt": [{"content": content, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"{draw.getrandbits(128):032x}"},
        }


def write(folder: Path, kind: str, problems: list[dict[str, Any]], rows: int) -> Path:
    """Write a dataset that repeats the problems equally often, in random order; return its path."""
    draw = random.Random(1)
    order = [i % len(problems) for i in range(rows)]
    draw.shuffle(order)
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist(problems)
        path = folder / "train.parquet"
        with pyarrow.parquet.ParquetWriter(path, table.schema) as writer:
            for start in range(0, rows, 100_000):
                writer.write_table(table.take(order[start : start + 100_000]))
        return path
    lines = [json.dumps(problem) for problem in problems]
    path = folder / "train.jsonl"
    with path.open("w") as file:
        for place, i in enumerate(order):
            file.write(lines[i] if "same" in kind else f'{lines[i][:-1]}, "row": {place}}}')
            file.write("\n")
    return path


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Write a byte-level BPE tokenizer with a chat template."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=2000, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
