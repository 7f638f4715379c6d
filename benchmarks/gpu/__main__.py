"""Measure rows 8 and 9 of the table on this machine's GPU; print them and write benchmarks/results/gpu_rows.json.

    python -m benchmarks.gpu [--peers DIR] [--repetitions 20] [--rows 8192] [--vocab 151936] [--hidden 5120] [--out FILE]

`make bench` installs the peers into .cache/peers. At full size it takes some 40 GB of GPU memory; what does not fit is left
out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.gpu import HIDDEN, ROWS, VOCAB
from benchmarks.results import ROOT, save, surroundings, table


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="a folder with installed peers (requirements/bench.txt)")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_rows.json")
    return parser.parse_args()


def main() -> None:
    """Measure, print and write."""
    args = arguments()
    if not torch.cuda.is_available():
        sys.exit("python -m benchmarks.gpu needs a GPU, and torch finds none; `make bench` measures on the CPU")
    from benchmarks.gpu.rows import measure

    properties = torch.cuda.get_device_properties(0)
    found = list(measure(args.peers, torch.device("cuda"), args.rows, args.vocab, args.hidden, args.repetitions))
    at = surroundings()
    at["machine"] |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
    objects = [measure.as_object() | at for measure in found]
    print(table(objects))
    save(args.out, objects)


if __name__ == "__main__":
    main()
