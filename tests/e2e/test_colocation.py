"""`rollout.colocate` with real servers, which sleep while a step is trained and must be woken to sample."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.resume_worlds import weights
from tests.recorded import step_records

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
RUN: dict[str, Any] = {
    "training__steps": 3, "rollout__prompts_per_step": 8, "rollout__samples_per_prompt": 4, "training__minibatch_prompts": 4,
    "rollout__max_response_tokens": 16, "rollout__filter_uniform_groups": "false", "objective__entropy_coefficient": 0.1,
    "optimizer__warmup_steps": 0, "optimizer__lr": "1e-3", "evaluation__every": 2, "evaluation__max_problems": 4,
    "rollout__server__kv_cache_gib": 0.25, "rollout__oversample": 1.5,
}  # fmt: skip
# lines of the server's log in five turns: each return of the KV cache; each flush (two to fall asleep, one per update)
LOGGED = {"vllm": ("wake up the engine with tags: ['kv_cache']", 5), "sglang": ("Cache flushed successfully!", 15)}
MEASURED = ("actor/grad_norm", "loss/total", "actor/entropy", "rollout/logprob_diff_max", "loss/kl")


def finished(command: Any) -> str:
    assert command.wait(300) == 0, command.output
    command.assert_nothing_left()
    output: str = command.output
    return output


@pytest.mark.parametrize("engine", ["vllm", "sglang", "torch"])
def test_a_run_in_turns_learns_what_the_same_rollouts_teach_without_them(
    tepo,
    arguments,
    random_model: Path,
    tmp_path: Path,
    engine: str,
) -> None:
    """The rollouts are recorded and learned from again with neither engine nor turns: each update and weight is the same, to
    the last bit. Sampling ends with the last group that is wanted, so that the engine is put to sleep in the middle of others.
    """
    runs = tmp_path / "runs"
    turns = RUN | {"rollout__colocate": "true", "rollout__record": "true", "checkpoint__every": 2, "rollout__engine": engine}
    output = finished(tepo(*arguments(random_model, **turns, name="turns")))
    again = RUN | {"rollout__replay": runs / "turns" / "rollouts", "rollout__oversample": 1}
    finished(tepo(*arguments(random_model, **again, name="apart")))
    with_turns, without = step_records(runs / "turns"), step_records(runs / "apart")
    assert len(with_turns) == len(without) == 3
    for a, b in zip(with_turns, without, strict=True):
        assert {k: a[k] for k in MEASURED} == {k: b[k] for k in MEASURED} and a["actor/grad_norm"] > 0
        # samples of the previous step's weights, the newest ones
        assert a["rollout/logprob_diff_mean"] <= 1e-5 and a["rollout/staleness"] == 0
        for phase in ("generate", "train"):
            assert 0.1 < a[f"memory/{phase}_held"] <= a[f"memory/{phase}_peak"] and a[f"memory/{phase}_servers"] > 0.1
    first, last = weights(runs / "turns"), weights(runs / "apart")
    assert first.keys() == last.keys() and all(torch.equal(first[name], last[name]) for name in first)
    assert output.count("accuracy at step") == 3 and "is started again" not in output
    # it sampled for step 0's evaluation and step 1, for step 2, for its evaluation, before a checkpoint, for step 3, and last
    if engine in LOGGED:
        log, (line, times) = (runs / "turns/server.log").read_text(), LOGGED[engine]
        assert log.count(line) == times, log
    assert "memory, GiB" in output and (runs / "turns/checkpoints/step-00000002").exists()
