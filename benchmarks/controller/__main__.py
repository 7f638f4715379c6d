"""Measure the rollout data path between inference servers and training ranks; print the table and write it.

    python -m benchmarks.controller [--sizes 1,4,12,67] [--only intake-json,ranks] [--out FILE]

The servers are a fake: one process that answers in vLLM's format (`fake_pool.py`). Everything else is the package's own. Each
part runs in a process of its own; if one fails, the others go on. Measured parts replace those in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.controller.measuring import Point, power_law
from benchmarks.results import ROOT, surroundings
from tepo_megatron.controller.service import relax_garbage_collector

OUT = ROOT / "benchmarks/results/controller.json"
PART_SECONDS = 1800.0
LARGEST = 67.0  # millions of tokens of a step
SIZES = [1.0, 4.0, 12.0, LARGEST]
EXPONENT = 1.1  # target of every row
ERROR_CHARACTERS = 4000  # of a part that failed, printed
# one thread: threads that spin would count as CPU time of the work
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
Row = dict[str, Any]


def growth(title: str, points: Sequence[Point], target: float | None = None) -> Row:
    """Return a row of the table: points in ascending order of size, and a bound on CPU seconds per million at the largest."""
    exponent, _ = power_law(points)
    per_million = points[-1].cpu_seconds / points[-1].size
    met = exponent <= EXPONENT and (target is None or per_million <= target)
    return {
        "title": title, "points": [asdict(point) for point in points], "exponent": exponent,
        "cpu_seconds_per_million": per_million, "target": target, "met": met,
    }  # fmt: skip


def _intake(sizes: Sequence[float], answer_format: str) -> list[Row]:
    from benchmarks.controller.engine_rows import CPU_TARGETS, intake

    name = {"json": "JSON"}.get(answer_format, answer_format)
    title = f"intake, {name} answers: receive, decode, check"
    return [growth(title, intake(sizes, answer_format), CPU_TARGETS[answer_format])]


def _collect(sizes: Sequence[float]) -> list[Row]:
    from benchmarks.controller.engine_rows import collect

    return [growth("intake and grading, in the process that collects", collect(sizes, "binary"))]


def _hand_over(sizes: Sequence[float]) -> list[Row]:
    from benchmarks.controller.hand_over import hand_over

    return [growth(f"hand-over to the ranks: {who}", points) for who, points in hand_over(sizes).items()]


def _ranks(sizes: Sequence[float]) -> list[Row]:
    from benchmarks.controller.host_rows import select_and_pack

    return [growth("every rank: flatten, select, pack one of 8 shares", select_and_pack(sizes))]


PARTS: Mapping[str, Callable[[Sequence[float]], list[Row]]] = {
    "intake-json": partial(_intake, answer_format="json"),
    "intake-binary": partial(_intake, answer_format="binary"),
    "collect": _collect,
    "hand-over": _hand_over,
    "ranks": _ranks,
}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.controller", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=_sizes, default=SIZES, metavar="M,...", help="millions of tokens of a step")
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PART,...", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=OUT, help=f"the file; default {OUT.relative_to(ROOT)}")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # internal: measure this part in this process
    return parser.parse_args()


def _sizes(text: str) -> list[float]:
    sizes = sorted({float(word) for word in text.split(",")})
    if len(sizes) < 2 or sizes[0] <= 0:
        raise argparse.ArgumentTypeError("give at least two positive sizes: a single one has no exponent")
    return sizes


def _parts(text: str) -> list[str]:
    if unknown := set(text.split(",")) - PARTS.keys():
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return text.split(",")


def measure_part(name: str, sizes: Sequence[float]) -> dict[str, Any]:
    """Measure a part in a process of its own. Returns its rows, or the last line of its errors."""
    found = surroundings() | {"sizes": list(sizes), "rows": [], "error": ""}
    with tempfile.TemporaryDirectory(prefix="controller-") as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.controller", "--part", name, "--out", str(out)]
        command += ["--sizes", ",".join(map(str, sizes))]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, text=True, timeout=PART_SECONDS
            )
        except subprocess.TimeoutExpired:
            return found | {"error": f"not done after {PART_SECONDS:g} s"}
        if done.returncode:
            print(done.stderr[-ERROR_CHARACTERS:], file=sys.stderr)
            return found | {"error": (done.stderr.strip().splitlines() or ["no error"])[-1][:300]}
        return found | {"rows": json.loads(out.read_text())}


def markdown(results: Mapping[str, Any]) -> str:
    """Return the page of the parts' results."""
    sizes = sorted({size for part in results.values() for size in part["sizes"]})
    text = [
        "# The rollout data path at the sizes of a cluster",
        "",
        "CPU seconds of the process that does the work, by millions of response tokens of a step (128 x 16 samples of",
        "6,000 tokens are 12M). Targets: CPU seconds per million tokens at the largest size, and an exponent of at most 1.1",
        "(least squares of the logarithms). `python -m benchmarks.controller` measures them again.",
        "",
        f"| part | {' | '.join(f'{size:g}M' for size in sizes)} | per million | exponent | target | |",
        f"|{'---|' * (len(sizes) + 5)}",
    ]
    for name, part in results.items():
        for row in part["rows"]:
            at = dict(zip(part["sizes"], row["points"], strict=True))
            cells = [f"{at[size]['cpu_seconds']:.3g}" if size in at else "" for size in sizes]
            cells += [f"{row['cpu_seconds_per_million']:.3g}", f"{row['exponent']:.2f}"]
            cells += ["" if row["target"] is None else f"<= {row['target']:g}", "met" if row["met"] else "MISSED"]
            text.append(f"| {row['title']} | {' | '.join(cells)} |")
        if part["error"]:
            text.append(f"| {name} | not measured: {part['error'].replace('|', '/')} |")
    text.append("")
    for commit in dict.fromkeys(part["commit"] for part in results.values()):
        of_commit = {name: part for name, part in results.items() if part["commit"] == commit}
        machine = next(iter(of_commit.values()))["machine"]
        loads = [part["machine"]["load"][0] for part in of_commit.values()]
        where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB"
        text.append(f"- commit {commit}; {where}, load {min(loads):g} to {max(loads):g}: {', '.join(of_commit)}")
    return "\n".join([*text, ""])


def main() -> None:
    """Measure the parts, print the table and write the file."""
    args = arguments()
    if args.part:
        relax_garbage_collector()  # as in the service
        args.out.write_text(json.dumps(PARTS[args.part](args.sizes)))
        os._exit(0)  # threads of an engine that was stopped in the middle of its work may hang
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.only:
        start = time.monotonic()
        results[name] = measure_part(name, args.sizes)
        print(f"{name}: {results[name]['error'] or 'done'} in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        results = {key: results[key] for key in PARTS if key in results}
        args.out.write_text(json.dumps(results, indent=1) + "\n")  # after each part: an interrupted run keeps what it has
        args.out.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
