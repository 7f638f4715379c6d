"""Judges of a run: where they are, which runs cannot have one, and what happens when a server of one dies."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tepo_megatron.config import JudgeTermConfig, RewardConfig, ServerConfig
from tepo_megatron.errors import CheckpointError, ConfigError
from tepo_megatron.inference import engines
from tepo_megatron.inference.engine_api import Platform
from tepo_megatron.rewards import build_reward
from tepo_megatron.rollout.judges import JudgePlace, check_judges, open_judges
from tests.graded import decode, rollout
from tests.scripted_api import ScriptedApi
from tests.tiny import tiny_qwen3


def judge(model: Path, **keys: Any) -> dict[int, JudgeTermConfig]:
    return {1: JudgeTermConfig(type="judge", model=str(model), question="{response}", **keys)}


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


def servers() -> list[psutil.Process]:
    """Return the scripted servers that this process started, guards excluded."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if one.cmdline()[1:3] == ["-m", "tests.scripted_server"]:
                found.append(one)
    return found


def test_a_judge_whose_server_dies_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet is the real one, and so are the processes of its server."""
    monkeypatch.setattr(engines, "ENGINES", {"vllm": ScriptedApi})
    tiny_qwen3(tmp_path / "model", layers=1)
    keys = {"question": "{prompt}{response}", "pattern": "([0-9])", "highest": 9.0, "max_tokens": 24, "max_prompt_tokens": 40}
    entry = JudgeTermConfig(
        type="judge", model=str(tmp_path / "model"), temperature=1.0, verdicts=2, server=ServerConfig(tp=1), **keys
    )
    cfg = RewardConfig(terms=[entry], workers=1)
    rollouts = [rollout(text) for text in ("1", "2", "<eos>", "x" * 40)]
    place = JudgePlace("cpu", "fp32", 0, tmp_path)
    with open_judges(cfg.judges, place) as judges, build_reward(cfg, decode, judges=judges.by_term) as reward:
        first = reward.score(rollouts)
        (server,) = servers()
        server.send_signal(signal.SIGKILL)
        again = reward.score(rollouts)
        events, end = judges.take_events(), time.monotonic() + 30
        while not any("is started again" in event for event in events):
            assert time.monotonic() < end, events
            events += judges.take_events()
        assert all(event.startswith("judge: reward.terms.0: ") for event in events)
        (other,) = servers()
        assert other.pid != server.pid
    # the last question has 41 tokens; the others are answered alike by any start of the server
    assert [one.status for one in first] == ["graded"] * 3 + ["unjudged"]
    assert len({one.score for one in first[:3]}) > 1 and all(0 <= one.score <= 1 for one in first)
    assert [(one.score, one.status) for one in again] == [(one.score, one.status) for one in first]
    assert (tmp_path / "judge-0.log").read_text().count("=== start ") == 2
    assert servers() == [] and not os.path.exists(f"/proc/{other.pid}")
