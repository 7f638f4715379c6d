"""The core of the tests, which `make test` runs. Every other file is marked `full`, and CI runs a rotating part of it.

The core is what the museum of bugs names (tests/mutants), the gate, and at least one file for the contract of each part of the
package and of the launcher.
"""

from __future__ import annotations

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
    *(f"tests/unit/losses/test_{name}.py" for name in ("method", "theory")),
    *(f"tests/unit/ops/test_{name}.py" for name in ("planning", "triton_compiled")),
    *(f"tests/unit/report/test_{name}.py" for name in ("report",)),
    *(f"tests/unit/rewards/test_{name}.py" for name in ("hostile_answers", "rewards")),
    *(f"tests/unit/weights/test_{name}.py" for name in ("convert", "families", "sync")),
    *(f"tests/unit/test_{name}.py" for name in (
        "atomic", "cli", "doctor", "misbehaving_servers", "mutants", "plan", "ranks", "rotation", "safety", "sinks",
        "unpickling",
    )),
)  # fmt: skip


@cache
def core() -> frozenset[str]:
    """Return the core's files and folders, from the root of the tree."""
    return frozenset(CONTRACTS) | {test.partition("::")[0] for exhibit in all_exhibits() for test in exhibit.tests}


def is_core(path: Path) -> bool:
    name = path.relative_to(ROOT)
    return any(str(place) in core() for place in (name, *name.parents))
