"""Where the judges of a run are, and which runs cannot have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import JudgeTermConfig, RolloutConfig
from tepo_megatron.errors import CheckpointError, ConfigError
from tepo_megatron.inference.engine_api import Platform
from tepo_megatron.rollout.judges import JudgePlace, check_judges, open_judges
from tests.tiny import tiny_qwen3


def judge(model: Path, **keys: Any) -> dict[int, JudgeTermConfig]:
    return {1: JudgeTermConfig(type="judge", model=str(model), question="{response}", **keys)}


@pytest.mark.parametrize(
    ("rollout", "first"),
    [
        ({"servers": 2, "server": {"tp": 2}}, 8),
        ({"servers": 4, "colocate": True}, 4),
        ({"server": {"urls": ["http://a:1"]}}, 4),
        ({"replay": "r"}, 4),
    ],
)
def test_judges_come_behind_ranks_and_servers(rollout: dict[str, Any], first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert JudgePlace.next_to(RolloutConfig(**rollout), 4, "cuda", "bf16", Path("logs")).first_device == first
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert JudgePlace.next_to(RolloutConfig(), 4, "cuda", "bf16", Path("logs")).first_device == 3


def test_runs_that_cannot_have_a_judge_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_qwen3(tmp_path / "model", layers=1)

    def refused(platform: Platform, first: int, message: str) -> None:
        place = JudgePlace(platform, "fp32", first, tmp_path / "logs")
        with pytest.raises(ConfigError, match=message), open_judges(judge(tmp_path / "model", servers=2), place):
            pass
        assert not (tmp_path / "logs").exists(), "nothing was started"

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    refused("cuda", 4, r"reward\.terms\.1: ranks, rollout servers and judges take 6 GPUs, and this machine has 5; .*colocate")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    refused("cpu", 0, r"reward\.terms\.1: .* on one machine, and the ranks are on several; .* set url")


def test_models_that_cannot_judge_are_refused_with_their_key(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no such directory; reward\.terms\.1\.model must name"):
        check_judges(judge(tmp_path / "nowhere"), "cpu")
    check_judges(judge(tmp_path / "nowhere", url="http://judge/v1"), "cpu")
    tiny_qwen3(tmp_path / "model", layers=1)
    check_judges(judge(tmp_path / "model"), "cpu")
