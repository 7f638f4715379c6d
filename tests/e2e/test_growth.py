"""A whole run whose vLLM is started again between two steps, because it grew, is the run without that, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_faults import whole_lines
from tests.parallel.resume_worlds import records, weights

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
A_PAGE = 4096 / 2**30  # GiB; each step of a young server takes some more
RUN: dict[str, Any] = {
    "parallel__tp": 1, "parallel__dp": 1, "training__steps": 3, "rollout__prompts_per_step": 4, "data__eval": "null",
    "rollout__samples_per_prompt": 4, "training__minibatch_prompts": 2, "rollout__max_response_tokens": 12,
    "rollout__filter_uniform_groups": "false", "objective__entropy_coefficient": 0.1, "optimizer__warmup_steps": 0,
    "optimizer__lr": "1e-3", "rollout__server__kv_cache_gib": 0.25, "rollout__server__restarts": 0,
}  # fmt: skip


def test_a_restart_between_steps_changes_no_bit(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    """Run both runs at once, since a server takes most of the time, and one core. The second step's growth ends the server."""
    limits = {"grown": f"{A_PAGE:.9f}", "straight": "0"}
    commands = {
        name: tepo(*arguments(random_model, **RUN, rollout__server__restart_after_growth_gib=limit, name=name))
        for name, limit in limits.items()
    }
    for command in commands.values():
        assert command.wait(120) == 0, command.output
        command.assert_nothing_left()
    grown, straight = tmp_path / "runs" / "grown", tmp_path / "runs" / "straight"
    assert [row["rollout/server_restarts"] for row in whole_lines(grown)] == [0, 0, 1]
    assert [row["rollout/server_restarts"] for row in whole_lines(straight)] == [0, 0, 0]
    assert "the inference server is started again" in commands["grown"].output
    assert records(grown) == records(straight) and records(grown)[2]["actor/grad_norm"] > 0
    first, last = weights(straight), weights(grown)
    assert first.keys() == last.keys() and all(torch.equal(first[name], last[name]) for name in first)
