"""`rollout.max_staleness`: rollouts sampled ahead, with a scripted engine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tepo_megatron.rollout import record
from tests.e2e.test_faults import refused, whole_lines
from tests.e2e.test_resume import RUN, STEPS, complete, finished, model  # noqa: F401

pytestmark = pytest.mark.e2e
AHEAD = RUN | {"rollout__max_staleness": 1, "rollout__record": "true", "rollout__filter_uniform_groups": "false"}


def prompts(run: Path, step: int) -> list[int]:
    rollouts, _ = record.read(run / record.FOLDER, step)
    return [r.prompt_id for r in rollouts[:: RUN["rollout__samples_per_prompt"]]]


@pytest.mark.full
def test_rollouts_are_one_step_old_and_take_the_prompts_that_taking_turns_would(
    tepo,
    arguments,
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    output = finished(tepo(*arguments(model, **AHEAD, name="ahead", evaluation__every=4), engine="good"))
    finished(tepo(*arguments(model, **AHEAD | {"rollout__max_staleness": 0}, name="turns"), engine="good"))
    assert [r["rollout/staleness"] for r in whole_lines(runs / "ahead")] == [0] + [1] * (STEPS - 1)
    assert [r["rollout/staleness"] for r in whole_lines(runs / "turns")] == [0] * STEPS
    for step in range(1, STEPS + 1):
        assert prompts(runs / "ahead", step) == prompts(runs / "turns", step)
        sampled, _ = record.read(runs / "ahead" / record.FOLDER, step)
        assert {r.policy_version for r in sampled} == {max(0, step - 2)}
    for when in (0, 4, 8, STEPS):
        assert f"accuracy at step {when}:" in output
    # one step of learning lies between the engine and the actor, and the gate on equal weights does not mistake it for a fault
    diffs = [r["rollout/logprob_diff_mean"] for r in whole_lines(runs / "ahead")]
    assert diffs[0] < 1e-5 and max(diffs[1:]) > 10 * diffs[0]


@pytest.mark.full
@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_rollouts_up_to_three_steps_old(tepo, arguments, model: Path, in_flight: str, tmp_path: Path) -> None:  # noqa: F811
    """No rollout is older than allowed, and every prompt comes once; the arrival time of new weights varies between runs."""
    run, straight = tmp_path / "runs" / "ahead", tmp_path / "runs" / "turns"
    settings = AHEAD | {"rollout__max_staleness": 3, "rollout__on_weight_update": in_flight}
    finished(tepo(*arguments(model, **settings, name="ahead", evaluation__every=4), engine="good"))
    finished(tepo(*arguments(model, **AHEAD | {"rollout__max_staleness": 0}, name="turns"), engine="good"))
    staleness = [r["rollout/staleness"] for r in whole_lines(run)]
    assert staleness[:2] == [0, 1] and max(staleness) <= 3 and len(staleness) == STEPS
    for step in range(1, STEPS + 1):
        assert prompts(run, step) == prompts(straight, step)


@pytest.mark.full
def test_whoever_resumes_loses_no_prompt_and_uses_none_twice(
    tepo,
    arguments,
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    straight, run = tmp_path / "runs" / "straight", tmp_path / "runs" / "killed"
    finished(tepo(*arguments(model, **AHEAD | {"checkpoint__every": 0}, name="straight"), engine="good"))
    command = tepo(*arguments(model, **AHEAD, checkpoint__max_restarts=0, name="killed"), engine="slow")
    command.until(lambda: bool(complete(run)) and len(whole_lines(run)) >= 5, timeout=100)
    os.kill(command.ranks()[-1], signal.SIGKILL)
    refused(command, "was ended by SIGKILL")
    assert "resume: from the checkpoint of step " in finished(
        tepo(*arguments(model, **AHEAD, name="killed", resume="true"), engine="good")
    )
    assert [r["step"] for r in whole_lines(run)] == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        assert prompts(run, step) == prompts(straight, step)
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS
