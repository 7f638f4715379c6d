"""A clock that jumps must not end a wait, nor prolong one: every deadline is on the monotonic clock."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tepo_megatron"
# calls of the wall clock -> the files that may ask it, none of which waits by it
WALL_CLOCK = {"time.time": {"ranks.py"}, "time.time_ns": set(), "datetime.now": set(), "datetime.utcnow": set()}


def test_nothing_but_labels_comes_from_the_wall_clock() -> None:
    found: dict[str, set[str]] = {name: set() for name in WALL_CLOCK}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not {alias.name for alias in node.names} & {"time", "time_ns"}, path
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            for call in WALL_CLOCK:
                if name == call or name.endswith(f".{call}"):
                    found[call].add(str(path.relative_to(PACKAGE)))
    for call, files in found.items():
        assert files <= WALL_CLOCK[call], f"{call} in {files - WALL_CLOCK[call]}: use time.monotonic() for whatever waits"
