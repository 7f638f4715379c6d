"""The core of the tests, which `make test` runs. Every other test is marked `full`, and CI runs a rotating part of them.

The core is what the museum of bugs names (tests/mutants), the gate, some whole runs, and every quick test of a file that has
one of these or the contract of a part of the package or of the launcher.
"""

from functools import cache
from pathlib import Path

from tests.mutants.exhibits import all_exhibits

ROOT = Path(__file__).parents[1]
CONTRACTS = (
    "tests/gate", "tests/lint",
    *(f"tests/e2e/test_{name}.py" for name in ("environments", "faults", "no_way_in_ranks", "train")),
    *(f"tests/launch/test_{name}.py" for name in ("dry_run", "local")),
    *(f"tests/unit/checkpoint/test_{name}.py" for name in ("checkpoint_files",)),
    *(f"tests/unit/config/test_{name}.py" for name in ("config", "run_dir")),
    *(f"tests/unit/data/test_{name}.py" for name in ("data",)),
    *(f"tests/unit/evaluation/test_{name}.py" for name in ("evaluate",)),
    *(f"tests/unit/losses/test_{name}.py" for name in ("method",)),
    *(f"tests/unit/ops/test_{name}.py" for name in ("planning",)),
    *(f"tests/unit/report/test_{name}.py" for name in ("report",)),
    *(f"tests/unit/rewards/test_{name}.py" for name in ("hostile_answers", "rewards")),
    *(f"tests/unit/models/test_{name}.py" for name in ("convert", "families", "sync")),
    *(f"tests/unit/test_{name}.py" for name in (
        "atomic", "cli", "doctor", "misbehaving_servers", "mutants", "plan", "ranks", "rotation", "safety", "sinks",
        "unpickling",
    )),
)  # fmt: skip
# Of these the slow tests, too.
SLOW_CONTRACTS = ("tests/gate", "tests/e2e", "tests/launch/test_local.py", "tests/unit/test_mutants.py")


@cache
def named() -> frozenset[str]:
    """Return FILE::FUNCTION of each test that an exhibit names, or FILE for all of a file."""
    return frozenset(test.partition("[")[0] for exhibit in all_exhibits() for test in exhibit.tests)


@cache
def _files() -> frozenset[str]:
    return frozenset(CONTRACTS) | {test.partition("::")[0] for test in named()}


def is_core(test: str, slow: bool) -> bool:
    """Return whether a test, FILE::FUNCTION[CASE] with the file's path from the root of the tree, is of the core."""
    file = Path(test.partition("::")[0])
    if test.partition("[")[0] in named() or str(file) in named():
        return True
    places = {str(place) for place in (file, *file.parents)}
    return bool(places & _files()) and (not slow or bool(places & set(SLOW_CONTRACTS)))
