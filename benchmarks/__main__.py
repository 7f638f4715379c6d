"""Run all CPU benchmarks, ours next to others', one after the other; print a table and write it.

    python -m benchmarks [--only 1,2] [--quick] [--peers DIR] [--out benchmarks/results/cpu.json]

`make bench` installs the peers first. Measured rows replace those in the file. The others stay as they are, each with the
commit at which it was measured. --quick only shows that the benchmarks run: small shapes, few repetitions, and nothing is
written unless --out names a file. Exit status 1 if a suite failed. On a GPU: `python tools/gpu_check.py`.

A suite is `measures` of a module. It has a process of its own, because it may set threads, fork and use memory.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import ROOT, ROWS, Object, SuiteOptions, load, merged, save, surroundings, table

OUT = ROOT / "benchmarks/results/cpu.json"
# waiting threads sleep: on a busy machine, spinning threads would make the times depend on other processes
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KINETO_LOG_LEVEL": "99"}
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# one thread before and after a fork, as in tests/conftest.py; without the flag verl would compile in each rank
_FORKS = _PASSIVE | _ONE_THREAD | {"TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
SUITES = {  # module, and the words for its `measures` -> rows, environment
    "token_stats": ((1, 2, 3), _PASSIVE),
    "token_stats collectives": ((4,), _FORKS),
    "packing": ((6,), {}),
    "step": ((7,), _PASSIVE),
    "checkpoint demo": ((11,), _ONE_THREAD),
    "checkpoint 100m": ((11,), _ONE_THREAD),
    "sync": ((12,), _ONE_THREAD),
    "overlap": ((13,), _ONE_THREAD),
    **{f"controller {part}": ((15,), _FORKS) for part in ("json", "binary", "collect", "hand-over", "ranks")},
}


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
    at, (module, *words) = surroundings(), name.split()
    measures = importlib.import_module(f"benchmarks.{module}").measures(options, *words)
    return [measure.as_object() | at for measure in measures if measure.row in options.rows]


def run_in_subprocess(name: str, args: argparse.Namespace) -> list[Object] | None:
    """Run a suite in a process of its own; return its measures, or None if it failed (its errors are on stderr)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "objects.json"
        words = ["--suite", name, "--out", str(out), "--only", ",".join(map(str, args.only))]
        words += ["--quick"] if args.quick else []
        words += ["--peers", str(args.peers.resolve())] if args.peers else []
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks", *words]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | SUITES[name][1], stdout=sys.stderr)
        return None if done.returncode else load(out)


def main() -> None:
    """Run the suites, print the table and write the file."""
    args = arguments()
    if args.suite:
        args.out.write_text(json.dumps(run_here(args.suite, SuiteOptions(args.peers, args.quick, args.only))))
        sys.stdout.flush()
        os._exit(0)  # threads of an engine that was stopped in the middle of its work may hang
    objects: list[Object] = []
    failed = []
    for name, (rows, _) in SUITES.items():
        if not args.only & set(rows):
            continue
        start = time.monotonic()
        measured = run_in_subprocess(name, args)
        print(f"{name}: {'failed' if measured is None else 'done'} in {time.monotonic() - start:.0f} s", file=sys.stderr)
        if measured is None:
            failed.append(name)
        objects += measured or []
    print(table(objects))
    out = args.out or (None if args.quick else OUT)
    if out is not None:
        save(out, merged(load(out), objects))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
