"""Environments of OpenEnv servers: a real one, and one that repeats what the real one said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import LimitsConfig
from tepo_megatron.config.io import load_config
from tepo_megatron.data import text_functions
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.rollout.custom import CustomRollouts, load_function
from tests.openenv import FRAMES, FULL, RecordedServer, real_server, recorded
from tests.unit.rollout.test_environments import pieces
from tests.unit.rollout.test_gateway import CHATML, Scripted, tokenizer
from tests.waiting import until

CONFIG = Path("examples/openenv/game.yaml")


class Player(Scripted):
    """Computes an operation, and then guesses 7; with `hangs`, it never ends a turn."""

    hangs = False

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        await asyncio.sleep(60 if self.hangs else 0)
        answered = self.chat.decode(prompt.token_ids).count("14") > 0
        self.turns = [list(self.chat.encode("\\boxed{7}<|im_end|>" if answered else "9+5="))]
        return await super().sample(prompt, sampling, seed)


def played(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    *,
    file: str = "",
    chat: bool = False,
    samples: int = 1,
    hangs: bool = False,
    seconds: float = 20.0,
) -> list[Rollout]:
    """Return the samples of the problem with this answer, made by the function of the example or of another file."""
    monkeypatch.setenv("OPENENV_URL", url)
    spec = file or load_config(CONFIG).rollout.function
    assert spec is not None
    made = tokenizer(CHATML)
    form = ChatFormat(made, *text_functions(made))
    engine = Player(form, [])
    engine.hangs = hangs
    messages = [{"role": "user", "content": "hi"}] if chat else []
    tokens = tuple(form.start(messages, ()) if chat else form.encode("hi"))
    limits = LimitsConfig(seconds=seconds)
    with CustomRollouts(engine, load_function(spec), form.encode, form.decode, limits=limits, chat=form) as custom:
        prompt = Prompt(7, tokens, answer, messages=messages)
        return custom.generate([prompt], SamplingParams(samples, 1.0, 400, (2,)), seed=0)


@contextmanager
def recorded_server() -> Iterator[str]:
    server = RecordedServer()
    with server.listening() as url:
        yield url
        until(lambda: not server.open)
    assert server.closed and not server.unknown


@pytest.fixture(params=["recorded", pytest.param("real", marks=pytest.mark.full)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server. At the end the recorded one has no open connection."""
    with recorded_server() if request.param == "recorded" else real_server() as address:
        yield address


def test_an_environment_of_a_server_is_played(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, reward in (("7", 1.0), ("8", 0.0)):
        rollouts = played(url, monkeypatch, answer, samples=16)
        assert [(rollout.failure, rollout.reward) for rollout in rollouts] == [("", reward)] * 16
        assert {tuple(pieces(rollout)) for rollout in rollouts} == {("hi", "9+5=", "14", "\\boxed{7}<|im_end|>")}
    (rollout,) = played(url, monkeypatch, "7", chat=True)
    between = "<|im_end|>\n<|im_start|>user\n14<|im_end|>\n<|im_start|>assistant\n"
    assert pieces(rollout)[1:] == ["9+5=", between, "\\boxed{7}<|im_end|>"] and rollout.reward == 1.0


def test_what_a_server_refuses_loses_the_sample_with_its_reason(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Path("examples/openenv/game.py").read_text()
    (tmp_path / "wrong.py").write_text(source.replace('{"text": text}', '{"word": text}'))
    (rollout,) = played(url, monkeypatch, "refused", file=f"{tmp_path / 'wrong.py'}:game")
    assert "step was refused" in rollout.failure and "VALIDATION_ERROR" in rollout.failure


def test_a_text_that_is_no_action_ends_the_episode(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = Path("examples/openenv/game.py").read_text()
    (tmp_path / "strict.py").write_text(source.replace('{"text": text}', '{"text": str(int(text))}'))
    (rollout,) = played(url, monkeypatch, "7", file=f"{tmp_path / 'strict.py'}:game")
    assert (rollout.failure, rollout.reward, pieces(rollout)) == ("", 0.0, ["hi", "9+5="])


def test_a_cancelled_sample_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_server() as address:
        (rollout,) = played(address, monkeypatch, "7", hangs=True, seconds=0.5)
        assert "timed out after rollout.limits.seconds" in rollout.failure


def test_a_server_without_a_place_or_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_server() as address:
        (rollout,) = played(address, monkeypatch, FULL)
        assert "raise max_concurrent_envs of the server" in rollout.failure
    (rollout,) = played(address, monkeypatch, "7")
    assert "Cannot connect" in rollout.failure
    server = RecordedServer()
    with server.listening() as address:
        (rollout,) = played(address, monkeypatch, "an unknown one")
        assert "the server closed the connection (CLOSE, 1000)" in rollout.failure


@pytest.mark.full
def test_a_server_gets_its_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with real_server(environments=1) as address:
        for _ in range(3):
            (rollout,) = played(address, monkeypatch, "7", hangs=True, seconds=0.5)
            assert "timed out" in rollout.failure
            until(lambda: not played(address, monkeypatch, "7")[0].failure)
        rollouts = played(address, monkeypatch, "7", samples=8)
        assert {r.reward for r in rollouts if not r.failure} <= {1.0}
        assert all("CAPACITY_REACHED" in r.failure for r in rollouts if r.failure) and any(r.failure for r in rollouts)


@pytest.mark.full
def test_the_recorded_frames_are_those_of_the_real_server() -> None:
    with real_server() as address, real_server(environments=1) as full:
        frames: Any = recorded(address, full)
    assert frames == json.loads(FRAMES.read_text())
