"""Names are the field's terms: no two public classes share one, and no identifier of the former private vocabulary is left."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("tepo_megatron", "launch", "tools", "examples", "benchmarks")

# Identifiers that were replaced by standard terms. A leading underscore makes no difference.
_FORMER = """
Beside Nothing Apart Colocation everybody Watch last_words Tally WholeStats Families Rounds Said agreed Meeting Taker taker
takers Kept Channel BrokenChannel lend lend_to_megatron borrowed Inbox InboxEngine inbox Member Life Rest rise Standstill
CUT Ask About Launch reached in_words boxes Views in_run mends OutOfRoom Stranger Here told mend keeper meeting meetings
came_key off_key tell_arrived illness give_up families lent beside anew room rooms fellow fellows Swelling
lend_triton_to_paged_stash mend_host_copy_of_splits servers_beside_ranks beside_the_paper keeper_name make_room
"""
FORMER = frozenset(_FORMER.split())

# Parts of identifiers (between underscores) that are words of the former vocabulary.
FORMER_WORD = re.compile(
    r"(^|_)(mends?|mended|told|beside|anew|rooms?|fellows?|takers?|boxes|everybody|inbox|keepers?)(_|$)", re.IGNORECASE
)


@cache
def modules() -> dict[Path, ast.Module]:
    """Return the syntax tree of every Python file of the checked folders."""
    return {path: ast.parse(path.read_text()) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the names that a module defines or assigns, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_no_two_public_classes_share_a_name():
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    shared = [f"{name}: {', '.join(places)}" for name, places in sorted(found.items()) if len(places) > 1]
    assert not shared, "Give each class a name of its own:\n" + "\n".join(shared)


def test_no_former_identifier_is_left():
    left = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in modules().items()
        for name, line in identifiers(tree)
        if (name.strip("_") in FORMER or FORMER_WORD.search(name))
    ]
    assert not left, "Use the standard term:\n" + "\n".join(left)
