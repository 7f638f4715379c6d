"""Whole runs in which everything takes X times as long as its limits know (`make slow`): none cuts work off that goes on.

The run's clock is X times as fast as its processors, so that a start of 40 s is one of 7 minutes at x10. The judge is outside
of the run, with a real clock.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Command, commands, settings, write_model
from tests.fast_clock.clock import SPEED, sweep, variables
from tests.recorded import step_records, steps_taken
from tests.unit.rewards.test_judge import serve

pytestmark = pytest.mark.fast_clock
Start, Words = Callable[..., Command], Callable[..., list[str]]
DEMO, STEPS, LIMIT = "examples/demo.yaml", 2, 300.0  # real seconds of one command
# Limits on work, which are made X times as long: the work itself is not slower, because a processor's time is no clock's.
EXEMPT: Mapping[str, tuple[float, str]] = {
    "reward.timeout_seconds": (4.0, "a grader's wall time, twice its processor time"),
    "run_seconds": (4.0, "a program's processor time, a fourth of its wall time"),
    "response_seconds": (60.0, "wall time of all programs of a response"),
}
SMALL: dict[str, Any] = {
    "training__steps": STEPS, "training__minibatch_prompts": 4, "rollout__prompts_per_step": 8,
    "rollout__samples_per_prompt": 4, "rollout__max_response_tokens": 16, "rollout__filter_uniform_groups": "false",
    "rollout__server__kv_cache_gib": 0.25, "optimizer__warmup_steps": 0, "evaluation__max_problems": 4,
}  # fmt: skip
# name -> (recipe, its keys)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": (DEMO, {"rollout__engine": "vllm", "rollout__server__tp": 2}),  # its front end waits for other processes
    "sglang": (DEMO, {"rollout__engine": "sglang"}),
    "colocated": (DEMO, {"rollout__engine": "vllm", "rollout__colocate": "true"}),
    "one_step_ahead": (DEMO, {"rollout__max_staleness": 1, "rollout__on_weight_update": "continue", "training__steps": 4}),
    "agent": ("examples/agents/calculator.yaml", {}),
}


def ended_well(command: Command) -> None:
    assert command.wait(LIMIT) == 0, command.output
    command.assert_nothing_left()


def checked(run: Path, *finished: Command, steps: int = STEPS) -> list[dict[str, Any]]:
    """Wait for commands, and assert that nothing was cut off: no process, server, sample or grade."""
    for command in finished:
        ended_well(command)
    rows = step_records(run)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    lost = ("rollout/server_restarts", "rollout/samples_raised", "rollout/samples_timed_out", "grading/timeout", "grading/died")
    assert not any(row.get(key) for row in rows for key in lost), rows
    log = (run / "log.txt").read_text()
    assert "is sent again" not in log and "is started again" not in log and "gave no answer" not in log, log
    return rows


@pytest.fixture(scope="module")
def speed() -> float:
    assert SPEED in os.environ, "run these tests with `make slow`, which tests the clock first"
    return float(os.environ[SPEED])


@pytest.fixture
def tepo(tmp_path: Path, speed: float) -> Iterator[Start]:
    with commands(tmp_path) as start:
        yield partial(start, env=variables(speed))
    sweep()


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("random") / "model")


@pytest.fixture
def words(random_model: Path, tmp_path: Path, speed: float) -> Words:
    """`tepo train`, with a small engine; the run's folder is tmp_path / NAME."""

    def build(name: str, recipe: str = DEMO, model: Path = random_model, **keys: Any) -> list[str]:
        keys = SMALL | {"rollout__engine": "torch", "output": tmp_path, "name": name} | keys
        keys["reward__timeout_seconds"] = EXEMPT["reward.timeout_seconds"][0] * speed
        return ["train", recipe, *settings(model, **keys)]

    return build


@pytest.mark.parametrize("name", RUNS)
def test_a_run(tepo: Start, words: Words, tmp_path: Path, name: str) -> None:
    recipe, keys = RUNS[name]
    checked(tmp_path / name, tepo(*words(name, recipe, **keys)), steps=keys.get("training__steps", STEPS))


def test_a_judge_that_thinks(tepo: Start, words: Words, tmp_path: Path) -> None:
    def verdict(body: dict[str, Any]) -> str:
        time.sleep(0.1)
        return "Verdict: 5"

    with serve() as api:
        api.script = verdict
        term = {"type": "judge", "model": "judge", "url": api.url, "question": "Grade {response}"}
        rows = checked(tmp_path / "judge", tepo(*words("judge", reward__terms=json.dumps([term]))))
    assert len(api.seen) >= 32 * STEPS and all(row["reward/mean"] == 0.5 for row in rows)


def test_programs_in_sandboxes(tepo: Start, words: Words, random_model: Path, tmp_path: Path, speed: float) -> None:
    model = shutil.copytree(random_model, tmp_path / "model")
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text().replace('"*"', '"`"'))
    tests = json.dumps({"inputs": ["7"], "outputs": ["7"]})
    for name in ("train", "eval"):
        rows = [{"prompt": f"{i}?\n", "answer": tests} for i in range(40)]
        (model / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    term = {"type": "code"} | {key: EXEMPT[key][0] * speed for key in ("run_seconds", "response_seconds")}
    rows = checked(tmp_path / "code", tepo(*words("code", model=model, reward__terms=json.dumps([term])), engine="programs"))
    assert all(0.2 < row["accuracy/mean"] < 0.8 for row in rows)


def test_a_killed_rank_and_a_killed_launcher(tepo: Start, words: Words, tmp_path: Path) -> None:
    run, keys = tmp_path / "resumed", {"training__steps": 8, "checkpoint__every": 1}
    first = tepo(*words("resumed", **keys))
    with first.stopped_when(lambda: steps_taken(run) >= 2, LIMIT):
        os.kill(first.ranks()[-1], signal.SIGKILL)
    first.until(lambda: "the ranks are restarted from the checkpoint of step" in first.output, LIMIT)
    first.until(lambda: steps_taken(run) >= 4, LIMIT)
    first.process.kill()
    first.assert_nothing_left()
    checked(run, second := tepo(*words("resumed", **keys, resume="true")), steps=8)
    assert "resume: from the checkpoint of step" in second.output


def test_servers_of_another_command(tepo: Start, words: Words, tmp_path: Path) -> None:
    places = {"rollout__server__rendezvous": tmp_path / "rendezvous", "sync__transport__folder": tmp_path / "weights"}
    command = words("served", **places)
    server = tepo("serve", command[1], "--host", "127.0.0.2", *command[2:])
    checked(tmp_path / "served", tepo(*command))
    server.process.terminate()
    ended_well(server)


def test_fine_tuning(tepo: Start, random_model: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text((random_model / "train.jsonl").read_text().replace('"answer"', '"response"'))
    config = {
        "name": "tuned", "platform": "cpu", "output": str(tmp_path), "parallel": {"dp": 2}, "checkpoint": {"every": 2},
        "model": {"path": str(random_model), "precision": "fp32"},
        "sft": {"data": str(tmp_path / "data.jsonl"), "max_tokens": 64, "batch_sequences": 8},
    }  # fmt: skip
    (tmp_path / "sft.yaml").write_text(json.dumps(config))
    ended_well(tepo("sft", tmp_path / "sft.yaml"))
    assert (tmp_path / "tuned" / "summary.json").exists()
