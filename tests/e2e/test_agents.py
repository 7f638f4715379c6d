"""The recipes of examples/agents with a real server: every turn is of the served weights, and no sample is lost."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Command, settings

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
STEPS = 3


@pytest.mark.parametrize("recipe", ["calculator", "game", "python_tool"])
def test_a_recipe_trains_on_the_turns_that_were_sampled(
    tepo: Callable[..., Command], base: Path, tmp_path: Path, recipe: str
) -> None:
    if recipe == "python_tool" and shutil.which("bwrap") is None:
        pytest.skip("no bwrap (Debian: apt-get install bubblewrap)")
    keys = {
        "output": tmp_path / "runs", "name": recipe, "training__steps": STEPS, "rollout__prompts_per_step": 16,
        "training__minibatch_prompts": 8, "evaluation__max_problems": 16, "rollout__filter_uniform_groups": "false",
    }  # fmt: skip
    command = tepo("train", f"examples/agents/{recipe}.yaml", *settings(base, **keys))
    assert command.wait(240) == 0, command.output
    command.assert_nothing_left()
    records = [json.loads(line) for line in (tmp_path / "runs" / recipe / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["rollout/logprob_diff_mean"] <= 1e-5 and record["actor/grad_norm"] > 0
        lost = [record[f"rollout/samples_{kind}"] for kind in ("raised", "timed_out", "over_limit")]
        assert lost == [0, 0, 0], command.output
