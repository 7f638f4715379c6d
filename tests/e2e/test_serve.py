"""`tepo serve` and `tepo train` as two commands that find each other by a folder: a served engine is killed in mid-run."""

import json
import os
import signal
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tepo_megatron.rollout import record
from tests.recorded import step_records, steps_taken

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
STEPS = 8
SERVER = "-m vllm.entrypoints"


def test_a_served_engine_killed_in_mid_run_costs_no_sample(tepo, arguments, base: Path, tmp_path: Path) -> None:
    rendezvous, weights, run = tmp_path / "rendezvous", tmp_path / "weights", tmp_path / "runs" / "far"
    settings = {"training__steps": STEPS, "rollout__server__rendezvous": rendezvous}
    settings |= {
        "sync__transport__folder": weights,
        "rollout__record": "true",
        "rollout__filter_uniform_groups": "false",
        "name": "far",
    }
    settings |= {"rollout__prompts_per_step": 8, "training__minibatch_prompts": 4, "evaluation__max_problems": 8}
    words = arguments(base, **settings)
    serve = tepo("serve", words[1], "--host", "127.0.0.2", *words[2:])
    train = tepo(*words)
    with train.stopped_when(lambda: steps_taken(run) >= 2, timeout=240):
        (url,) = serve.ready_urls()
        assert url.startswith("http://127.0.0.2:")
        assert not any(SERVER in line for line in train.left_over())
        os.kill(serve.oldest_server(SERVER), signal.SIGKILL)
    assert train.wait(240) == 0, f"{train.output}\n{serve.output}"
    train.assert_nothing_left()
    assert "SIGKILL" in serve.output and "is started again (restart 1)" in serve.output
    assert f"at {url}" in train.output and "is started again (restart 1)" in train.output
    for step in range(1, STEPS + 1):
        rollouts, _ = record.read(run / record.FOLDER, step)
        assert len(rollouts) == 64 and {r.policy_version for r in rollouts} == {step - 1}
    records = step_records(run)
    assert len(records) == STEPS and all(r["rollout/logprob_diff_mean"] <= 1e-5 for r in records)
    assert list(weights.iterdir()) == []  # what carried the weights is gone

    key = (rendezvous / "key").read_text().strip()
    assert not any(key in text for text in (serve.output, train.output, *(log.read_text() for log in rendezvous.glob("*.log"))))
    os.kill(serve.process.pid, signal.SIGTERM)
    assert serve.wait(120) == 0, serve.output
    serve.assert_nothing_left()
    assert list(rendezvous.glob("*.json")) == []


def test_a_served_engine_takes_turns_and_is_killed_in_the_trainers(tepo, arguments, base: Path, tmp_path: Path) -> None:
    """A colocated run needs no folder for weights, because the server is on the machine of the ranks."""
    rendezvous, run = tmp_path / "rendezvous", tmp_path / "runs" / "turns"
    settings = {"training__steps": 4, "rollout__server__rendezvous": rendezvous, "name": "turns"}
    settings |= {"rollout__record": "true", "rollout__filter_uniform_groups": "false", "rollout__colocate": "true"}
    settings |= {"rollout__prompts_per_step": 8, "training__minibatch_prompts": 4, "evaluation__max_problems": 8}
    words = arguments(base, **settings)
    serve = tepo("serve", words[1], "--host", "127.0.0.2", *words[2:])
    train = tepo(*words)

    def ranks_have_the_devices() -> bool:
        return steps_taken(run) > 0 and sleeps(serve.ready_urls()[0], (rendezvous / "key").read_text().strip())

    with train.stopped_when(ranks_have_the_devices, timeout=240):
        os.kill(serve.oldest_server(SERVER), signal.SIGKILL)
    assert train.wait(240) == 0, f"{train.output}\n{serve.output}"
    train.assert_nothing_left()
    assert "SIGKILL" in serve.output and "is started again (restart 1)" in train.output
    for step in range(1, 5):
        rollouts, _ = record.read(run / record.FOLDER, step)
        assert len(rollouts) == 64 and {r.policy_version for r in rollouts} == {step - 1}
    records = step_records(run)
    assert len(records) == 4 and all(r["rollout/logprob_diff_mean"] <= 1e-5 for r in records)
    os.kill(serve.process.pid, signal.SIGTERM)
    assert serve.wait(120) == 0, serve.output
    serve.assert_nothing_left()


def sleeps(url: str, key: str) -> bool:
    """Return whether a vLLM sleeps."""
    with urlopen(Request(f"{url}/is_sleeping", headers={"Authorization": f"Bearer {key}"}), timeout=60) as answer:
        return bool(json.load(answer)["is_sleeping"])
