"""`tepo replay` of runs with real engines: every number and weight comes out again, bit for bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Command
from tests.parallel.resume_worlds import records, weights
from tests.recorded import step_records

pytestmark = [pytest.mark.e2e, pytest.mark.full]
STEPS = 6
RUN = {
    "training__steps": STEPS, "training__minibatch_prompts": 4,
    "rollout__prompts_per_step": 8, "rollout__samples_per_prompt": 4,
    "rollout__record": "true", "rollout__filter_uniform_groups": "false", "rollout__max_generation_rounds": 1,
    "optimizer__lr": "1e-4", "evaluation__every": 0, "evaluation__max_problems": 8,
}  # fmt: skip
RESTART, CONTINUE = ({"rollout__max_staleness": 2, "rollout__on_weight_update": then} for then in ("restart", "continue"))
# name -> (engine, layout and more keys, what happens to the run)
CASES: dict[str, tuple[str, dict[str, object], str]] = {
    "vllm, in turns, TP2": ("vllm", {"parallel__tp": 2}, ""),
    "vllm, finish, DP2": ("vllm", {"parallel__tp": 1, "parallel__dp": 2, "rollout__max_staleness": 1}, ""),
    "vllm, restart, CP2": ("vllm", RESTART | {"parallel__tp": 1, "parallel__cp": 2}, ""),
    "vllm, continue, PP2": ("vllm", CONTINUE | {"parallel__tp": 1, "parallel__pp": 2}, ""),
    "vllm, continue, a rank killed": ("vllm", CONTINUE | {"parallel__tp": 2}, "rank"),
    "vllm, in turns, a rank killed, TP2 to DP2": ("vllm", {"parallel__tp": 2}, "layout"),
    "vllm, streamed by arrival, a rank killed, DP2": (
        "vllm", {"parallel__tp": 1, "parallel__dp": 2, "training__stream": "arrival"}, "rank",
    ),
    "sglang, streamed by prompt, continue": ("sglang", CONTINUE | {"parallel__tp": 1, "training__stream": "prompt"}, ""),
    "sglang, in turns, DP2": ("sglang", {"parallel__tp": 1, "parallel__dp": 2}, ""),
    "sglang, continue, TP2": ("sglang", CONTINUE | {"parallel__tp": 2}, ""),
    "sglang, restart, a server killed": ("sglang", RESTART | {"parallel__tp": 2}, "server"),
    "sglang, finish, the launcher killed, CP2": (
        "sglang", {"parallel__tp": 1, "parallel__cp": 2, "rollout__max_staleness": 1}, "launcher",
    ),
}  # fmt: skip


def disturb(command: Command, what: str, run: Path) -> None:
    """Kill what the case says once a checkpoint is complete, and wait for the run's end, unless it goes on by itself."""
    command.until(lambda: any(run.glob("checkpoints/step-????????")), timeout=240)
    if what == "server":
        os.kill(command.oldest_server("--port"), signal.SIGKILL)
        return
    ranks = sorted(int(line.split()[0]) for line in command.left_over() if "tepo_megatron.trainer.worker" in line)
    os.kill(command.process.pid if what == "launcher" else ranks[-1], signal.SIGKILL)
    if what == "rank":
        command.until(lambda: "ranks restarted from the checkpoint of step" in (run / "log.txt").read_text(), timeout=240)
        return
    assert command.wait(120) != 0
    command.assert_nothing_left()


@pytest.mark.parametrize("case", CASES)
def test_a_run_comes_out_again(
    case: str, tepo: Callable[..., Command], arguments: Callable[..., list[str]], base: Path, tmp_path: Path
) -> None:
    engine, keys, what = CASES[case]
    run, more = tmp_path / "runs" / "a", {"checkpoint__every": 2} if what else {}
    if what == "layout":
        more["checkpoint__max_restarts"] = 0
    words = arguments(base, **RUN | keys | more, name="a", rollout__engine=engine)
    command = tepo(*words)
    if what:
        disturb(command, what, run)
    if what in ("launcher", "layout"):
        other = ["--parallel.tp", "1", "--parallel.dp", "2"] if what == "layout" else []
        command = tepo("resume", run, *other)
    assert command.wait(300) == 0, command.output
    rows = step_records(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)) and max(row["actor/grad_norm"] for row in rows) > 0
    again = tepo("replay", run)
    assert again.wait(300) == 0, again.output
    assert f"every number of the steps 1 to {STEPS} is equal" in again.output
    assert f"weights: {len(weights(run))} tensors are equal bit for bit" in again.output
    assert len(records(run.with_name("a-replay"))) == STEPS and not list(run.with_name("a-replay").glob("server*.log"))
