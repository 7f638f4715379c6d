"""No call of the package or of launch/ can wait for ever, but for those that nobody waits for.

A call that blocks is given a time limit as an argument, or stands in a block that has one (`asyncio.timeout`, `time_limit`).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

# method -> arguments without which it waits for ever; its time limit is one more, or a keyword
WAITS = {
    "wait": 0, "join": 0, "get": 0, "result": 0, "recv": 0, "accept": 0, "communicate": 0, "acquire": 0, "exception": 0,
    "recv_bytes": 0, "recv_fds": 3, "wait_for": 1, "run_until_complete": 1, "serve_forever": 0,
}  # fmt: skip
LIMITS = {"timeout", "timeout_at", "time_limit", "wait_for"}  # `async with asyncio.timeout(5):`, `asyncio.wait_for(x, 5)`
KEYWORDS = {"timeout", "seconds", "blocking"}
SUBPROCESS = {"run", "call", "check_call", "check_output"}
GROUPS = {"new_group", "init_process_group", "initialize_model_parallel"}
OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "monitored_barrier"}
LIMITERS = {"settimeout", "limit_blocking"}  # calls that limit every later read of a socket
# module.function -> why it may wait without a limit
EXCEPTIONS = {
    "checkpoint.saving.run": "an idle daemon thread; who has given it a task waits with a limit",
    "service.service.run": "the service is idle between the calls of rank 0, whose end ends it",
    "service.service._read": "a daemon thread that reads until rank 0 closes its end or dies",
    "service.service._received": "between two rank 0s, until the launcher closes its end",
    "engines.servers.slot.supervise": "a server is not restarted while the ranks hold its GPU; they have limits",
    "report.live.server.serve": "a page is served until Ctrl-C",
    "rewards.pool._take": "an idle grading worker waits for work; `close` cancels it",
    "base.processes.wait_for_end": "a daemon thread that watches for the death of a process",
    "wire.receiver.torch_server.sample": "an idle server waits for requests; its guard ends it",
    "launch.login._ssh": "the user's own command on the login node, such as `logs --follow`, until Ctrl-C",
}
# What these call has a limit inside: a method of this package, a collective, a task that ended. Or it is a context variable.
LIMITED_INSIDE = set("""
base.loop._copy base.loop.run command.launcher.launch engines.servers.updates.update_weights
evaluation.held_out.sample_and_grade rewards.pool._stop rewards.terms.score rollout.function_thread._call_task
rollout.function_thread._settle sync.broadcast._form_groups sync.broadcast.complete sync.broadcast.wait sync.push._send
sync.push._stage sync.stores.wait trainer.driver._start trainer.service_client.call trainer.sft.loop._stop
trainer.sft.loop.run trainer.train._sample trainer.train.finish trainer.train.stop wire.broadcast_group._form
wire.broadcast_group.wait wire.receiver.receiver._receive wire.receiver.sglang_server.response
wire.receiver.vllm_middleware._binary wire.receiver.vllm_middleware.from_new_request wire.receiver.vllm_middleware.response
""".split())  # fmt: skip  # noqa: SIM905


def unlimited(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module.function and place of each call of a file that can wait for ever."""
    tree = ast.parse(path.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        above: list[ast.AST] = []
        while (above[-1] if above else call) in parents:
            above.append(parents[above[-1] if above else call])
        if may_wait(call, above) and not any(has_limit(node, call) for node in above):
            function = next((n.name for n in above if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), "")
            module = ".".join(path.with_suffix("").parts).removeprefix("tepo_megatron.")
            yield f"{module}.{function}", f"{path}:{call.lineno}: {ast.unparse(call)}"


def may_wait(call: ast.Call, above: list[ast.AST]) -> bool:
    """Return whether a call is one that waits, and has no time limit among its arguments."""
    name, owner = last(call.func), call.func.value if isinstance(call.func, ast.Attribute) else None
    calls = [call, *(arg for arg in call.args if isinstance(arg, ast.Call) and name == "run_until_complete")]
    if any(word.arg in KEYWORDS and not is_none(word.value) for each in calls for word in each.keywords):
        return False
    module = owner.id if isinstance(owner, ast.Name) else ""
    if name in GROUPS:
        return not any("timeout" in (word.arg or "") for word in call.keywords) and len(call.args) < 3
    if name in OBJECTS:
        return module == "dist" and not any(word.arg == "group" for word in call.keywords)
    if name == "select":
        return len(call.args) < 4 if module == "select" else not call.args and owner is not None
    if (module == "subprocess" and name in SUBPROCESS) or (name == "wait" and module in ("asyncio", "futures")):
        return True
    if owner is None or len(call.args) != WAITS.get(name):
        return False
    if name in ("recv", "accept") and last(owner).strip("_") in limited_sockets(above[-1]):
        return False
    in_coroutine = any(isinstance(node, ast.AsyncFunctionDef) for node in above)
    return name not in ("result", "exception") or not in_coroutine  # those of tasks do not wait


def has_limit(node: ast.AST, call: ast.Call) -> bool:
    """Return whether a block or a call around another call limits its time."""
    if isinstance(node, ast.AsyncWith | ast.With):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        return any(last(c.func) in LIMITS and c.args and not is_none(c.args[0]) for c in calls)
    return isinstance(node, ast.Call) and last(node.func) == "wait_for" and len(node.args) == 2 and node.args[0] is call


def limited_sockets(tree: ast.AST) -> set[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and last(node.func) in LIMITERS]
    return {last(call.func.value if isinstance(call.func, ast.Attribute) else call.args[0]).strip("_") for call in calls}


def is_none(node: ast.expr) -> bool:
    branches = (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node,)
    return any(isinstance(branch, ast.Constant) and branch.value is None for branch in branches)


def last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_every_wait_has_a_limit() -> None:
    files = [path for place in ("tepo_megatron", "launch") for path in sorted(Path(place).rglob("*.py"))]
    waits = [wait for path in files for wait in unlimited(path)]
    known = EXCEPTIONS.keys() | LIMITED_INSIDE
    assert [place for function, place in waits if function not in known] == [], "give it a time limit, and an error with a name"
    assert sorted(known - {function for function, _ in waits}) == [], "these exceptions are not needed"
    assert len(EXCEPTIONS) <= 10
