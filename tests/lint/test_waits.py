"""No call of the package or of launch/ can wait for ever, but for those that nobody waits for."""

from tests.lint.waits import all_unlimited

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
