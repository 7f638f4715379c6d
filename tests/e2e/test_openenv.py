"""A whole run in the environment of an OpenEnv server, with a real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tepo_megatron.monitor.sinks import read_metrics
from tests.e2e.conftest import Command, settings
from tests.openenv import real_server

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
STEPS = 3


def test_a_run_plays_in_an_openenv_server(tepo: Callable[..., Command], base: Path, tmp_path: Path) -> None:
    keys = {
        "output": tmp_path / "runs", "name": "game", "training__steps": STEPS, "rollout__prompts_per_step": 16,
        "training__minibatch_prompts": 8, "evaluation__max_problems": 16, "rollout__filter_uniform_groups": "false",
    }  # fmt: skip
    with real_server(environments=256) as url:
        command = tepo("train", "examples/openenv/game.yaml", *settings(base, **keys), env={"OPENENV_URL": url})
        assert command.wait(240) == 0, command.output
        command.assert_nothing_left()
    records = read_metrics(tmp_path / "runs" / "game")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["rollout/logprob_diff_mean"] <= 1e-5 and record["actor/grad_norm"] > 0
        lost = [record[f"rollout/samples_{kind}"] for kind in ("raised", "timed_out", "over_limit")]
        assert lost == [0, 0, 0], command.output
