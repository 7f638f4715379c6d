"""A whole run of a hybrid (Qwen3.5) with a real vLLM: `make demo MODEL=qwen3_5` in a small form."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.recorded import step_records

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
STEPS = 3


def test_a_hybrid_trains_and_the_engine_serves_what_the_actor_has(tepo, arguments, hybrid_base: Path, tmp_path: Path) -> None:
    settings = {
        "training__steps": STEPS,
        "evaluation__every": STEPS,
        "optimizer__warmup_steps": 0,
        "evaluation__max_problems": 16,
    }
    settings |= {
        "rollout__prompts_per_step": 8,
        "training__minibatch_prompts": 4,
        "sync__delta": "layers",
        "sync__verify_every": 1,
    }
    command = tepo(*arguments(hybrid_base, name="hybrid", **settings))
    assert command.wait(240) == 0, command.output
    command.assert_nothing_left()
    run = tmp_path / "runs" / "hybrid"
    records = step_records(run)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    for r in records:
        assert r["rollout/logprob_diff_mean"] <= 1e-5 and r["rollout/logprob_diff_max"] <= 1e-3
        assert r["rollout/kept_groups"] > 0 and r["actor/grad_norm"] > 0
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (hybrid_base, run / "hf"))
    assert before.keys() == after.keys()
    assert {n for n in before if torch.equal(before[n], after[n])} == set(), "every tensor was trained"
