"""Tasks of verifiers: their programs talk to the gateway, and their reward is the sample's."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import LimitsConfig
from tepo_megatron.config.io import load_config
from tepo_megatron.data import text_functions
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.rollout.custom import CustomRollouts, load_function
from tests.openenv import ROOT, application, serving
from tests.unit.rollout.test_environments import pieces
from tests.unit.rollout.test_gateway import CHATML, Scripted, tokenizer
from tests.waiting import until


def played(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    row: Mapping[str, Any],
    text: str = "4<|im_end|>",
    samples: int = 1,
    **limits: Any,
) -> list[Rollout]:
    """Return the samples of a row, in which the model writes `text`, or the tokens of a whole response if it is empty."""
    monkeypatch.setenv("VERIFIERS_URL", url)
    made = tokenizer(CHATML)
    chat = ChatFormat(made, *text_functions(made))
    engine = Scripted(chat, [list(chat.encode(text)) or [8] * 500])
    spec = load_config("examples/verifiers/sums.yaml").rollout.function
    assert spec is not None
    settings = LimitsConfig(**{"seconds": 60.0, **limits})
    with CustomRollouts(engine, load_function(spec), chat.encode, chat.decode, limits=settings, chat=chat) as custom:
        prompt = Prompt(7, tuple(chat.encode("hi")), "0", dict(row))
        return custom.generate([prompt], SamplingParams(samples, 1.0, 400, (2,)), seed=0)


class Server:
    """Plays episodes of one turn, as the server of examples/verifiers does."""

    def __init__(self) -> None:
        self.cancelled = 0

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Serve on a free port, and yield the address."""
        app = web.Application()
        app.router.add_post("/episode", self._episode)
        with application(app) as url:
            yield url

    async def _episode(self, request: web.Request) -> web.Response:
        body = await request.json()
        chat = {"model": body["model"], "messages": [{"role": "user", "content": body["task"]["prompt"]}]}
        headers = {"Authorization": f"Bearer {body['api_key']}"}
        url = f"{body['base_url']}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=chat) as answer:
            assert answer.status == 200
        if body["task"]["prompt"] == "hang":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        error = {"error": "TaskError: no grade"}
        return web.json_response(error if body["task"]["prompt"] == "error" else {"reward": 0.25})


def test_a_reward_comes_back_or_the_reason_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    with server.listening() as url:
        for rollout in played(url, monkeypatch, {"task": {"prompt": "add"}}, samples=4):
            assert (rollout.failure, rollout.reward, rollout.status) == ("", 0.25, "given")
            assert pieces(rollout) == ["<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n", "4<|im_end|>"]
        (rollout,) = played(url, monkeypatch, {"task": {"prompt": "error"}})
        assert "VerifiersError: TaskError: no grade" in rollout.failure
        (rollout,) = played(url, monkeypatch, {"level": 3})
        assert "the row has no column 'task'" in rollout.failure
        (rollout,) = played(url, monkeypatch, {"task": {"prompt": "hang"}}, seconds=0.5)
        assert "timed out" in rollout.failure
        until(lambda: server.cancelled == 1)


@pytest.mark.full
def test_a_taskset_is_played_by_the_real_verifiers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving("verifiers", "examples/verifiers/server.py", "sums") as url:
        file = tmp_path / "sums.jsonl"
        words = [ROOT / ".venv-verifiers" / "bin" / "python", "examples/verifiers/server.py", "sums", "--export", file]
        subprocess.run(words, cwd=ROOT, check=True, timeout=120)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(rows) == 100 and rows[13]["prompt"] == "1+3?"
        for text, reward in (("It is 4<|im_end|>", 1.0), ("It is 5<|im_end|>", 0.0)):
            for rollout in played(url, monkeypatch, {"task": rows[13]["task"]}, text, samples=2):
                assert (rollout.failure, rollout.reward) == ("", reward)
                assert pieces(rollout) == ["<|im_start|>user\n1+3?<|im_end|>\n<|im_start|>assistant\n", text]
        (rollout,) = played(url, monkeypatch, {"task": rows[13]["task"]}, "")
        assert (rollout.failure, rollout.reward, rollout.stop_reason) == ("", 0.0, "length")
        (rollout,) = played(url, monkeypatch, {"task": {"prompt": 3}})
        assert "VerifiersError: " in rollout.failure and "prompt" in rollout.failure
