"""A real judge next to a real run: it grades, it comes back when it is killed, and it is compared with labels."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Command
from tests.e2e.test_secrets import keys_of_servers

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
SHORT = {
    "training__minibatch_prompts": 4, "rollout__prompts_per_step": 4, "rollout__samples_per_prompt": 2,
    "rollout__filter_uniform_groups": "false", "rollout__max_response_tokens": 8, "evaluation__max_problems": 4,
}  # fmt: skip
JUDGE = {
    "type": "judge", "weight": 0.5, "question": "{prompt}{response}", "pattern": "([0-9])", "highest": 9, "temperature": 1.0,
    "max_tokens": 32, "max_prompt_tokens": 64, "retries": 3, "max_unjudged_share": 0.9, "server": {"kv_cache_gib": 1},
}  # fmt: skip


def terms(model: Path, **keys: Any) -> str:
    return json.dumps([{"type": "math"}, {**JUDGE, "model": str(model), **keys}])


def records_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_run_learns_from_a_judge_that_is_killed_in_between(
    tepo: Callable[..., Command], arguments: Callable[..., list[str]], random_model: Path, tmp_path: Path, engine: str
) -> None:
    run = tmp_path / "runs" / "judged"
    judge = terms(random_model, engine=engine)
    words = arguments(random_model, **SHORT, name="judged", training__steps=400, reward__terms=judge, rollout__record="true")
    command = tepo(*words)
    command.until(lambda: len(records_of(run)) >= 2, timeout=300)
    lines = command.left_over()
    assert len(keys_of_servers(lines)) == 2, "each of the two fleets has a key of its own"
    os.kill(_server_of(command, run / "judge-1.log"), signal.SIGKILL)
    command.until(lambda: "is started again" in command.output, timeout=60)
    before = len(records_of(run))
    command.until(lambda: len(records_of(run)) >= before + 2, timeout=120)
    command.process.send_signal(signal.SIGTERM)
    command.wait(120)
    command.assert_nothing_left()
    assert "judge: " in command.output and "reward.terms.1" in command.output
    rows = records_of(run)
    assert all(row["rollout/server_restarts"] == 0 and row["rollout/logprob_diff_mean"] <= 1e-5 for row in rows)
    assert all(row["grading/unjudged"] < 0.9 for row in rows)
    assert any(row["reward/mean"] != row["accuracy/mean"] for row in rows), "the judge's values are in the reward"


def test_a_judge_that_cannot_serve_ends_the_run_with_its_key(
    tepo: Callable[..., Command], arguments: Callable[..., list[str]], random_model: Path, tmp_path: Path
) -> None:
    judge = terms(random_model, server={"extra_args": ["--no-such-option"], "kv_cache_gib": 1})
    command = tepo(*arguments(random_model, **SHORT, name="refused", training__steps=2, reward__terms=judge))
    assert command.wait(240) == 1
    assert "reward.terms.1" in command.output and "no-such-option" in command.output, command.output
    command.assert_nothing_left()


def _server_of(command: Command, log: Path) -> int:
    """Return the process of a server that writes this log, which was started first."""
    found = []
    for line in command.left_over():
        pid = int(line.split()[0])
        if "guard" not in line and "grading/worker" not in line and os.path.realpath(f"/proc/{pid}/fd/1") == str(log.resolve()):
            found.append(pid)
    return min(found, key=lambda pid: psutil.Process(pid).create_time())
