"""Compare a loss function, value and gradients, with the fp64 reference.

    python -m tests.conformance my_package.losses:grpo --as grpo --set clip_high=0.2
    python -m tests.conformance mine.py:OWN --as grpo
    python -m tests.conformance trl verl --peers FOLDER [--write]

A function is given a `tests.conformance.parts.Part` and returns what that part contributes to the loss. An `Objective`
of a file (docs/add_objective.md) is called as the trainer calls it. Exit status 1 where a case fails.
"""

import argparse
import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.user_file import load
from tepo_megatron.report.audit.reference import Formula
from tests.conformance import page
from tests.conformance.cases import CASES
from tests.conformance.check import Result, Subject, check_all
from tests.reference.methods import CORRECTION_BOUNDS, METHODS

ADAPTERS = ("trl", "verl")


def method_of(row: str, replaced: list[str]) -> Formula:
    """Return the method of a row with parts replaced."""
    if row not in METHODS:
        raise SystemExit(f"--as {row}: no such method; one of {', '.join(METHODS)}")
    parts = dict(METHODS[row])
    names = {field.name for field in dataclasses.fields(Formula)}
    for word in replaced:
        name, _, value = word.partition("=")
        if name not in names:
            raise SystemExit(f"--set {word}: no such part; one of {', '.join(sorted(names))}")
        try:
            parts[name] = math.inf if value == "inf" else json.loads(value)
        except json.JSONDecodeError:
            parts[name] = value
    low, high = CORRECTION_BOUNDS[parts.get("correction", "none")]
    return Formula(**{"correction_low": low, "correction_high": high} | parts)


def subjects_of(name: str, args: argparse.Namespace) -> list[Subject]:
    """Return the loss functions that a name on the command line selects.

    Args:
        name: `trl`, `verl`, or the function or `Objective` of a user, as "module:NAME" or "path/to/file.py:NAME".
    """
    if name in ADAPTERS:
        adapter = importlib.import_module(f"tests.conformance.adapters.{name}")
        try:
            return adapter.subjects()
        except ImportError as error:
            raise SystemExit(f"{name}: {error}. It needs {adapter.NEEDS}") from error
    module, colon, attribute = name.rpartition(":")
    if not colon or args.row is None:
        raise SystemExit(f"{name}: give one of {', '.join(ADAPTERS)}, or module:NAME or file.py:NAME with --as ROW")
    sys.path.insert(0, str(Path.cwd()))
    try:
        of_file = load(name, "loss", "a loss").value if module.endswith(".py") else None
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    loss = of_file or getattr(importlib.import_module(module), attribute)
    objectives = sys.modules.get("tepo_megatron.losses.objective")  # which a file that makes an Objective has imported
    if objectives is not None and isinstance(loss, objectives.Objective):
        from tests.conformance.adapters.own import loss_of

        loss = loss_of(loss)
    return [Subject(name, loss, method_of(args.row, args.replaced), args.splits_sequences)]


def report(subject: Subject, results: list[Result]) -> int:
    """Print the results of one function; return the number of failed cases that it does not explain."""
    print(f"{subject.name}: {sum(r.passed is True for r in results)} of {len(results)} cases pass")
    unexplained = 0
    for result in results:
        name = result.case.name
        if result.passed is None:
            print(f"  -     {name}: {result.message}")
        elif result.passed:
            print(f"  ok    {name} ({max(result.loss_error, result.gradient_error):.0e})")
        else:
            says = subject.says.get(name)
            unexplained += says is None
            print(f"  FAIL  {name}\n{result.message}" + (f"\n    by design {says}" if says else ""))
    return unexplained


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"module:NAME, file.py:NAME, or one of {', '.join(ADAPTERS)}")
    parser.add_argument("--as", dest="row", metavar="ROW", help=f"what it should compute: one of {', '.join(METHODS)}")
    parser.add_argument("--set", dest="replaced", nargs="+", default=[], metavar="PART=VALUE", help="parts to replace")
    parser.add_argument(
        "--splits-sequences", action="store_true", help="a part with some of a sequence's tokens is enough for the function"
    )
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where packages are that are not installed, or a checkout")
    parser.add_argument("--write", action="store_true", help=f"write {page.PAGE}")
    args = parser.parse_args(argv)
    if args.peers is not None:
        sys.path.append(str(args.peers.resolve()))
    failed, tables = 0, {}
    for name in args.names:
        tables[name] = [(subject, check_all(subject)) for subject in subjects_of(name, args)]
        for subject, results in tables[name]:
            failed += report(subject, results)
    if args.write:
        page.write(tables, CASES)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
