"""Put each exhibit's bug into a copy of the tree, and see which test notices it.

    python -m tests.mutants                       # all exhibits, the tests that each names; writes the kill matrix
    python -m tests.mutants --only NAME [NAME..]  # some
    python -m tests.mutants --sample 6            # as many, others at each commit
    python -m tests.mutants --all                 # all default tests, until the first failure; hours

Exit status 1 where a bug is noticed by no test, or where the tests fail without it.
"""

import argparse
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from benchmarks.results import commit
from tests.mutants import matrix
from tests.mutants.copies import ROOT, Copy, Verdict, selection
from tests.mutants.exhibit import Exhibit
from tests.mutants.exhibits import all_exhibits

DEFAULT_TESTS = ("-m", "not full and not server and not e2e")


def chosen(args: argparse.Namespace) -> list[Exhibit]:
    """Return the exhibits that the command line asks for."""
    exhibits = all_exhibits()
    if unknown := set(args.only) - {exhibit.name for exhibit in exhibits}:
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: no exhibit has this name")
    if args.only:
        return [exhibit for exhibit in exhibits if exhibit.name in args.only]
    if args.sample:
        return random.Random(commit()).sample(exhibits, min(args.sample, len(exhibits)))
    return exhibits


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--sample", type=int, default=0, metavar="N")
    parser.add_argument("--all", action="store_true", help="all default tests instead of those that the exhibit names")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0, help="for the tests of one exhibit (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write {matrix.RESULTS} and {matrix.PAGE}")
    args = parser.parse_args(argv)
    exhibits = chosen(args)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free: SimpleQueue[Copy] = SimpleQueue()
        for number in range(args.workers):
            free.put(Copy(ROOT, Path(folder) / str(number)))

        def look(exhibit: Exhibit) -> Verdict:
            copy = free.get()
            try:
                return copy.look(exhibit, DEFAULT_TESTS if args.all else selection(exhibit.tests), args.seconds)
            finally:
                free.put(copy)

        verdicts = []
        with ThreadPoolExecutor(args.workers) as pool:
            for verdict in pool.map(look, exhibits):
                verdicts.append(verdict)
                print(verdict.line(), flush=True)
    caught = sum(verdict.caught_by is not None for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} bugs were noticed")
    if args.write:
        matrix.write(ROOT, verdicts)
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
