"""No call of the package or of launch/ can wait for ever, but for those that nobody waits for."""

from __future__ import annotations

from pathlib import Path

from tests.lint.waits import Known, all_unlimited, unlimited

# (module, function) -> why it may wait without a limit
EXCEPTIONS = {
    ("tepo_megatron/checkpoint/saving.py", "run"): "an idle daemon thread; who has given it a task waits with a limit",
    ("tepo_megatron/controller/service.py", "run"): "the service is idle between the calls of rank 0, whose end ends it",
    ("tepo_megatron/controller/service.py", "_read"): "a daemon thread that reads until rank 0 closes its end or dies",
    (
        "tepo_megatron/controller/service.py",
        "_received",
    ): "between two rank 0s, until the launcher closes its end",
    (
        "tepo_megatron/inference/servers/slot.py",
        "supervise",
    ): "a server is not restarted while the ranks hold its GPU; they have limits",
    ("tepo_megatron/report/live/server.py", "serve"): "a page is served until Ctrl-C",
    ("tepo_megatron/rewards/pool.py", "_take"): "an idle grading worker waits for work; `close` cancels it",
    ("tepo_megatron/utils/processes.py", "wait_for_end"): "a daemon thread that watches for the death of a process",
    ("tepo_megatron/weight_sync/receiver/torch_server.py", "sample"): "an idle server waits for requests; its guard ends it",
    ("launch/login.py", "_ssh"): "the user's own command on the login node, such as `logs --follow`, until Ctrl-C",
}


def test_every_wait_has_a_limit() -> None:
    waits = {(wait.path, wait.function): f"{wait.path}:{wait.line}: {wait.text}" for wait in all_unlimited()}
    assert [text for key, text in waits.items() if key not in EXCEPTIONS] == [], (
        "give it a time limit, and an error with a name"
    )
    assert sorted(EXCEPTIONS.keys() - waits.keys()) == [], "these exceptions are not needed"
    assert len(EXCEPTIONS) <= 10


CODE = """
import asyncio, queue, select, subprocess, threading
import torch.distributed as dist

class Own:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.items = process, queue.Queue()

    def wait(self) -> None: ...

    async def later(self, event: asyncio.Event, task: asyncio.Task[int], own: "Own") -> int:
        async with asyncio.timeout(5):
            await event.wait()
        await asyncio.wait_for(event.wait(), 5)
        {in_coroutine}
        own.wait()
        return task.result()

    def now(self, thread: threading.Thread, names: list[str], table: dict[str, int]) -> None:
        thread.join(5)
        ",".join(names)
        table.get("x")
        self.process.wait(timeout=5)
        {now}
"""
FOREVER = {
    "in_coroutine": ("await event.wait()", "await asyncio.wait({task})"),
    "now": (
        "thread.join()", "self.process.wait()", "self.process.communicate()", "self.items.get()", "select.select([0], [], [])",
        "subprocess.run(names)", "dist.new_group([0])", "dist.all_gather_object(names, 1)", "thread.join(timeout=None)",
    ),
}  # fmt: skip


def test_waits_without_a_limit_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    for place, lines in FOREVER.items():
        for line in lines:
            file.write_text(CODE.format(**{"in_coroutine": "pass", "now": "pass"} | {place: line}))
            assert [wait.text for wait in unlimited(file, Known([file]))] == [line.removeprefix("await ")], line
