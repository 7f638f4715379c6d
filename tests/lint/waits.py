"""Find calls that can wait for ever, over the syntax tree of the package and of launch/.

A call that blocks is given a time limit as an argument, or stands in a block that has one (`asyncio.timeout`, `time_limit`).
What a receiver is follows from annotations and constructors: first those of its file, then those of the package.
"""

import ast
import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PLACES = ("tepo_megatron", "launch")
# method -> arguments without which it waits for ever; its time limit is one more, or a keyword
WAITS = {
    "wait": 0, "join": 0, "get": 0, "result": 0, "recv": 0, "accept": 0, "communicate": 0, "acquire": 0, "exception": 0,
    "recv_bytes": 0, "recv_fds": 3, "wait_for": 1, "run_until_complete": 1, "serve_forever": 0, "poll": None, "select": None,
}  # fmt: skip
LIMITS = {"timeout", "timeout_at", "time_limit", "wait_for"}  # `async with asyncio.timeout(5):`, `asyncio.wait_for(x, 5)`
KEYWORDS = {"timeout", "seconds", "blocking"}
SUBPROCESS = {"run", "call", "check_call", "check_output"}
GROUPS = {"new_group", "init_process_group", "initialize_model_parallel"}
OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "monitored_barrier"}
# `get` of a context variable does not wait. A collective ends with the limit of its group, and every group is given one.
FREE = {"ContextVar", "Work", "StagedWork"}
STANDARD = ("asyncio", "subprocess", "threading", "queue", "multiprocessing", "socket")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CONTAINERS = {"Any", "Sequence", "Mapping", "Iterator", "Iterable", "Annotated", "Literal", "Callable"}
LIMITERS = {"settimeout", "limit_blocking"}  # calls that limit every later read of a socket


@dataclass(frozen=True)
class Wait:
    """A call without a time limit: its file, the function around it, and its text."""

    path: str
    function: str
    text: str
    line: int


def unlimited(path: Path, known: "Known") -> Iterator[Wait]:
    """Yield the calls of a file that can wait for ever."""
    tree = ast.parse(path.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        above = list(_above(call, parents))
        if not _may_wait(call, above, known, path) or any(_limits(node, call) for node in above):
            continue
        function = next((n.name for n in above if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), "")
        yield Wait(str(path), function, ast.unparse(call), call.lineno)


def _above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def _may_wait(call: ast.Call, above: list[ast.AST], known: "Known", path: Path) -> bool:
    """Return whether a call is one that waits, and has no time limit among its arguments."""
    name, owner = _last(call.func), call.func.value if isinstance(call.func, ast.Attribute) else None
    calls = [call, *(arg for arg in call.args if isinstance(arg, ast.Call) and name == "run_until_complete")]
    if any(word.arg in KEYWORDS and not _is_none(word.value) for each in calls for word in each.keywords):
        return False
    module = owner.id if isinstance(owner, ast.Name) else ""
    if name in GROUPS:
        return not any("timeout" in (word.arg or "") for word in call.keywords) and len(call.args) < 3
    if name in OBJECTS:
        return module == "dist" and not any(word.arg == "group" for word in call.keywords)
    if module == "subprocess" and name in SUBPROCESS:
        return True
    if name == "select":
        return len(call.args) < 4 if module == "select" else not call.args and owner is not None
    if name == "wait" and module in ("asyncio", "futures"):
        return True
    if owner is None or WAITS.get(name) is None or len(call.args) != WAITS[name]:
        return False
    kinds = known.kinds(owner, path, above)
    if name in ("recv", "accept") and _last(owner).strip("_") in _limited(above[-1]):
        return False
    if kinds & FREE or (kinds & known.own and not kinds - known.own):
        return False  # what a class of the package waits for is looked at in that class
    if name in ("result", "exception"):  # those of tasks do not wait
        in_coroutine = any(isinstance(node, ast.AsyncFunctionDef) for node in above)
        return not in_coroutine and not any(kind.startswith("asyncio.") for kind in kinds)
    return True


def _limits(node: ast.AST, call: ast.Call) -> bool:
    """Return whether a block or a call around another call limits its time."""
    if isinstance(node, ast.AsyncWith | ast.With):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        return any(_last(c.func) in LIMITS and c.args and not _is_none(c.args[0]) for c in calls)
    return isinstance(node, ast.Call) and _last(node.func) == "wait_for" and len(node.args) == 2 and node.args[0] is call


def _limited(tree: ast.AST) -> set[str]:
    """Return the names of the sockets of a file that have a time limit."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last(node.func) in LIMITERS]
    sockets = [call.func.value if isinstance(call.func, ast.Attribute) else call.args[0] for call in calls]
    return {_last(node).strip("_") for node in sockets}


def _is_none(node: ast.expr) -> bool:
    branches = (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node,)
    return any(isinstance(branch, ast.Constant) and branch.value is None for branch in branches)


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class Known:
    """What names stand for: the classes in their annotations, or those that construct their values."""

    def __init__(self, files: list[Path]) -> None:
        self.own: set[str] = set()  # classes of the package
        self._methods: dict[tuple[str, str], set[str]] = {}  # (class, method) -> classes that it returns
        self._of_file: dict[Path, dict[str, set[str]]] = {}
        for path in files:
            self._of_file[path] = names = defaultdict(set)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    self.own.add(node.name)
                    returning = [m for m in node.body if isinstance(m, FUNCTIONS) and m.returns is not None]
                    self._methods |= {(node.name, m.name): _classes(m.returns) for m in returning}
                for name, kinds in _named(node):
                    names[name] |= kinds
        self._everywhere: dict[str, set[str]] = defaultdict(set)
        for names in self._of_file.values():
            for name, kinds in names.items():
                self._everywhere[name] |= kinds

    def kinds(self, node: ast.expr, path: Path, above: list[ast.AST]) -> set[str]:
        """Return the classes that an expression may have; empty if that is not written anywhere."""
        while isinstance(node, ast.Await | ast.Subscript):
            node = node.value
        if isinstance(node, ast.Call) and self.own & (made := _made(node)):
            return made
        name = _last(node.func if isinstance(node, ast.Call) else node)
        if name == "self":
            return {n.name for n in above if isinstance(n, ast.ClassDef)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owners = self.kinds(node.func.value, path, above) & self.own
            if returned := set().union(*(self._methods.get((owner, name), set()) for owner in owners)):
                return returned
        inner = [kinds for n in above if isinstance(n, FUNCTIONS) for bound, kinds in _bindings(n) if bound == name]
        kinds = set().union(*inner) or self._of_file[path].get(name) or self._everywhere.get(name, set())
        called = {kind for kind in kinds if kind.islower() and "." not in kind}  # functions, which stand for what they return
        return (kinds - called).union(*(self._everywhere.get(name, set()) - {name} for name in called))


def _bindings(function: ast.AST) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(function):
        if node is not function:
            yield from _named(node)


def _named(node: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Yield the names that a node binds, with the classes that it names for them."""
    if isinstance(node, ast.AnnAssign):
        yield _last(node.target), _classes(node.annotation)
    elif isinstance(node, ast.arg) and node.annotation is not None:
        yield node.arg, _classes(node.annotation)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
        yield node.name, _classes(node.returns)
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        for target in node.targets:
            yield _last(target), _made(node.value)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None and isinstance(node.context_expr, ast.Call):
        yield _last(node.optional_vars), _made(node.context_expr)


def _made(call: ast.Call) -> set[str]:
    """Return the class that a constructor, or a class method such as `Checkpoints.open`, makes."""
    func = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    owner = _last(func.value) if isinstance(func, ast.Attribute) else ""
    return {owner} if owner[:1].isupper() else {_qualified(func)}


def _qualified(node: ast.AST) -> str:
    known = isinstance(node, ast.Attribute) and _last(node.value) in STANDARD
    return f"{_last(node.value)}.{node.attr}" if known and isinstance(node, ast.Attribute) else _last(node)


def _classes(annotation: ast.expr) -> set[str]:
    """Return the classes that an annotation names: those in a container, but not the parameters of a class."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        with contextlib.suppress(SyntaxError):  # a word of a Literal
            return _classes(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript) and _classes(annotation.value):
        return _classes(annotation.value)
    if isinstance(annotation, ast.Name | ast.Attribute):
        name = _qualified(annotation)
        return {name} if ("." in name or name[:1].isupper()) and name not in CONTAINERS else set()
    return set().union(*map(_classes, (node for node in ast.iter_child_nodes(annotation) if isinstance(node, ast.expr))))


@functools.cache
def all_unlimited() -> list[Wait]:
    """Return the calls of the package and of launch/ that can wait for ever."""
    files = [path for place in PLACES for path in sorted(Path(place).rglob("*.py"))]
    known = Known(files)
    return [wait for path in files for wait in unlimited(path, known)]
