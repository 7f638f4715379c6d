"""Tests ask modules for what is public, and touch no private state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
# private state of other packages, which offer nothing public instead
FOREIGN = {
    "_C", "_INNER_TENSORS", "_cdata", "_coalescing_manager", "_compute_loss", "_current_graph_task_id", "_data",
    "_dummy_wgrads", "_exit", "_fp8_workspaces", "_getframe", "_nnz", "_rank_not_in_group", "_rebuild_tensor_v2", "_replace",
    "_scale_inv", "_semlock", "_source_rank", "_transpose", "_transpose_invalid", "_utils",
}  # fmt: skip


def accesses(source: str) -> Iterator[str]:
    """Yield `value._name` of everything but self and cls, and private names that are imported from this package."""

    def private(name: str) -> bool:
        return name.startswith("_") and not name.endswith("__") and name not in FOREIGN

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tepo_megatron":
            yield from (f"{node.lineno}: import {alias.name}" for alias in node.names if private(alias.name))


def test_private_accesses_are_found() -> None:
    counted = [
        "actor._plan",
        "self.fleet._members[0]",
        "from tepo_megatron.report import _tell",
        "from tepo_megatron import _a, b",
    ]
    others = ["self._plan", "cls._plan", "x.__dict__", "os._exit(1)", "from other import _name", "x.public", "_local = 1"]
    assert [len(list(accesses(source))) for source in counted] == [1] * 4
    assert [source for source in others if list(accesses(source))] == []


def test_no_private_state_is_touched() -> None:
    found = [f"{path.relative_to(TESTS)}:{line}" for path in sorted(TESTS.rglob("*.py")) for line in accesses(path.read_text())]
    assert found == []
