"""Run all CPU benchmarks, ours next to others', one after the other; print a table and write it.

    python -m benchmarks [--only 1,2] [--quick] [--peers DIR] [--out benchmarks/results/cpu.json]

`make bench` installs the peers first. Measured rows replace those in the file. The others stay as they are, each with the
commit at which it was measured. --quick only shows that the benchmarks run: small shapes, few repetitions, and nothing is
written unless --out names a file. Exit status 1 if a suite failed. On a GPU: `python tools/gpu_check.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import ROOT, ROWS, Object, load, merged, save, surroundings, table
from benchmarks.suites import SUITES, SuiteOptions

OUT = ROOT / "benchmarks/results/cpu.json"


def arguments() -> argparse.Namespace:
    """Parse the command line; --only becomes a set of row numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_rows, default=set(ROWS), metavar="ROW,...", help="rows of the table")
    parser.add_argument("--quick", action="store_true", help="small shapes, few repetitions")
    parser.add_argument("--peers", type=Path, help="a folder with installed peers (requirements/bench.txt)")
    parser.add_argument("--out", type=Path, help=f"the file; without --quick {OUT.relative_to(ROOT)}")
    parser.add_argument("--suite", choices=SUITES, help=argparse.SUPPRESS)  # internal: run this suite in this process
    return parser.parse_args()


def _rows(text: str) -> set[int]:
    rows = {int(word) for word in text.split(",")}
    if not rows <= ROWS.keys():
        raise argparse.ArgumentTypeError(f"rows are {', '.join(map(str, ROWS))}")
    return rows


def run_here(name: str, options: SuiteOptions) -> list[Object]:
    """Run a suite in this process; return its measures with machine, versions and commit."""
    if options.peers is not None:
        sys.path.append(str(options.peers))
    at = surroundings()
    return [measure.as_object() | at for measure in SUITES[name].run(options) if measure.row in options.rows]


def run_in_subprocess(name: str, args: argparse.Namespace) -> list[Object] | None:
    """Run a suite in a process of its own; return its measures, or None if it failed (its errors are on stderr)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "objects.json"
        words = ["--suite", name, "--out", str(out), "--only", ",".join(map(str, args.only))]
        words += ["--quick"] if args.quick else []
        words += ["--peers", str(args.peers.resolve())] if args.peers else []
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks", *words]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | SUITES[name].environment, stdout=sys.stderr)
        return None if done.returncode else load(out)


def main() -> None:
    """Run the suites, print the table and write the file."""
    args = arguments()
    if args.suite:
        args.out.write_text(json.dumps(run_here(args.suite, SuiteOptions(args.peers, args.quick, args.only))))
        return
    objects: list[Object] = []
    failed = []
    for name, suite in SUITES.items():
        if not args.only & set(suite.rows):
            continue
        start = time.monotonic()
        found = run_in_subprocess(name, args)
        print(f"{name}: {'failed' if found is None else 'done'} in {time.monotonic() - start:.0f} s", file=sys.stderr)
        if found is None:
            failed.append(name)
        objects += found or []
    print(table(objects))
    out = args.out or (None if args.quick else OUT)
    if out is not None:
        save(out, merged(load(out), objects))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
