"""Measure the rollout data path between inference servers and training ranks; print the tables and write them.

    python -m benchmarks.controller [--sizes 1,4,12,67] [--only intake-json,take] [--state now] [--out FILE]

The servers are a fake: one process that answers in vLLM's format (`fake_pool.py`). Everything else is the package's own. Each
part runs in a process of its own; a part that fails is reported, and the others go on. Measured parts replace those of the same
state in the file. Two states are kept, `before` a change and `now`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.controller.parts import LARGEST, PARTS, GrowthRow
from benchmarks.controller.results_table import STATES, load_results, markdown, save_results
from benchmarks.results import ROOT, surroundings
from tepo_megatron.controller.service import relax_garbage_collector

OUT = ROOT / "benchmarks/results/controller.json"
PART_SECONDS = 1800.0
SIZES = [1.0, 4.0, 12.0, LARGEST]
ERROR_CHARACTERS = 4000  # of a part that failed, printed
# one thread: threads that spin would count as CPU time of the work
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.controller", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=_sizes, default=SIZES, metavar="M,...", help="millions of tokens of a step")
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PART,...", help=", ".join(PARTS))
    parser.add_argument("--state", choices=STATES, default=STATES[-1], help="the state of the code that is measured")
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
    """Measure a part in a process of its own. Returns its rows and figures, or the last line of its errors."""
    found = surroundings() | {"sizes": list(sizes), "rows": [], "figures": [], "error": ""}
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
        return found | json.loads(out.read_text())


def main() -> None:
    """Measure the parts, print the tables and write the file."""
    args = arguments()
    if args.part:
        relax_garbage_collector()  # as in the service
        found = PARTS[args.part](args.sizes)
        rows = [x.as_object() for x in found if isinstance(x, GrowthRow)]
        figures = [x.as_object() for x in found if not isinstance(x, GrowthRow)]
        args.out.write_text(json.dumps({"rows": rows, "figures": figures}))
        os._exit(0)  # threads of an engine that was stopped in the middle of its work may hang
    results = load_results(args.out)
    for name in args.only:
        start = time.monotonic()
        part = measure_part(name, args.sizes)
        print(f"{name}: {part['error'] or 'done'} in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        state = results.setdefault(args.state, {})
        state[name] = part
        results[args.state] = {key: state[key] for key in PARTS if key in state}
        save_results(args.out, results)  # after each part, so that an interrupted run keeps what it has
    print(markdown(results))


if __name__ == "__main__":
    main()
