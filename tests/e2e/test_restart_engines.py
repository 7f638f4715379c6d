"""Ranks that die next to real servers, with every transport, and the switches of delivery and streaming together."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.rollout.decisions import read_history
from tests.e2e.conftest import Command
from tests.e2e.test_faults import SHORT
from tests.recorded import step_records, steps_taken

pytestmark = [pytest.mark.e2e, pytest.mark.full]
STEPS = 16
NOISE = 1e-5  # nats; fp32
CHECKED = {"sync__verify_every": 1}
# name -> (engine, keys)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm, group": ("vllm", {"sync__transport": "group"}),
    "vllm, ipc": ("vllm", {"sync__transport": "ipc"}),
    "vllm, ipc, colocated": ("vllm", CHECKED | {"sync__transport": "ipc", "rollout__colocate": "true"}),
    "vllm, group, layers": ("vllm", CHECKED | {"sync__transport": "group", "sync__delta": "layers"}),
    "vllm, two servers, layers, ahead": (
        "vllm",
        CHECKED | {"sync__delta": "layers", "rollout__servers": 2, "rollout__max_staleness": 1},
    ),
    "vllm, group, continue": (
        "vllm",
        CHECKED | {"sync__transport": "group", "rollout__max_staleness": 2, "rollout__on_weight_update": "continue"},
    ),
    "sglang, group, layers": ("sglang", CHECKED | {"sync__transport": "group", "sync__delta": "layers"}),
    "sglang, group, streamed by prompt": (
        "sglang",
        CHECKED | {"sync__transport": "group", "training__stream": "prompt", "rollout__filter_uniform_groups": "false"},
    ),
    "sglang, layers, streamed by arrival": ("sglang", CHECKED | {"sync__delta": "layers", "training__stream": "arrival"}),
    "sglang, layers, colocated": ("sglang", CHECKED | {"sync__delta": "layers", "rollout__colocate": "true"}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_die_go_on_with_their_servers(
    case: str, tepo: Callable[..., Command], arguments: Callable[..., list[str]], base: Path, tmp_path: Path
) -> None:
    """Kill a rank. No server is restarted, and every token matches the actor's weights."""
    engine, keys = CASES[case]
    run, more = tmp_path / "runs" / "a", {"training__steps": STEPS, "checkpoint__every": 2, "parallel__tp": 2}
    command = tepo(*arguments(base, **SHORT | more | keys, name="a", rollout__engine=engine))
    command.until(lambda: steps_taken(run) >= 3, timeout=240)
    servers = servers_of(command)
    ranks = sorted(int(line.split()[0]) for line in command.left_over() if "tepo_megatron.trainer.worker" in line)
    os.kill(ranks[-1], signal.SIGKILL)
    command.until(lambda: "ranks restarted from the checkpoint of step 2" in (run / "log.txt").read_text(), timeout=240)
    assert servers_of(command) == servers, "a server was restarted"
    assert command.wait(240) == 0, command.output
    command.assert_nothing_left()
    records = step_records(run)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert sum(r["rollout/server_restarts"] for r in records) == 0
    compared = [r["gate/logprob_diff_worst"] for r in records if r["gate/logprob_diff_worst"] is not None]
    assert len(compared) >= STEPS // 2 and max(compared) <= NOISE
    history = read_history(run)
    assert not history.faults and [after for after, _ in history.starts] == [0, 2]


def servers_of(command: Command) -> list[str]:
    return sorted(line for line in command.left_over() if "engines.servers.guard" in line)
