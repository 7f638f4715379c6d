"""Servers of OpenEnv: the real one of examples/openenv, and one that repeats what the real one was recorded to say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tepo_megatron.base.loop import LoopThread
from tests.waiting import until

ROOT = Path(__file__).parents[1]
FRAMES = ROOT / "tests" / "data" / "openenv_frames.json"
# episode -> messages of a client; the answer of a problem names its episode
EPISODES: dict[str, list[dict[str, Any]]] = {
    answer: [
        {"type": "reset", "data": {"answer": answer}},
        {"type": "step", "data": {"text": "9+5="}},
        {"type": "step", "data": {"text": "\\boxed{7}"}},
    ]
    for answer in ("7", "8")
}
EPISODES["refused"] = [
    {"type": "reset", "data": {"answer": "refused"}},
    {"type": "step", "data": {"word": "9+5="}},
    {"type": "step", "data": {"text": "9+5="}},
]
FULL = "full"  # an episode for which the server has no place


@contextmanager
def application(app: web.Application) -> Iterator[str]:
    """Serve an application on a free port, in a thread; yield its address."""
    loop, runner = LoopThread("application of a test"), web.AppRunner(app, handler_cancellation=True)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    try:
        loop.run(start())
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        loop.run(runner.cleanup())
        loop.stop()


@contextmanager
def real_server(environments: int = 64) -> Iterator[str]:
    """Start the server of examples/openenv, and yield its address."""
    with serving("openenv", "examples/openenv/server.py", "--environments", str(environments)) as address:
        yield address


@contextmanager
def serving(name: str, *words: str) -> Iterator[str]:
    """Start a server in the environment that `make NAME` makes, with a free port, and yield its address."""
    folder = ROOT / f".venv-{name}" / "bin"
    if not folder.exists():
        pytest.skip(f"{name} is not installed: make {name}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    process = subprocess.Popen([str(folder / "python"), *words, "--port", str(port)], cwd=ROOT, env={**os.environ, **path})

    def listens() -> bool:
        assert process.poll() is None, f"the server of {name} ended"
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(listens)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


class RecordedServer:
    """Answers each message of an episode as the real server did, and hangs up at any other message."""

    def __init__(self) -> None:
        self._frames: dict[str, Any] = json.loads(FRAMES.read_text())
        self.open, self.closed, self.unknown = 0, 0, list[Any]()

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Serve on a free port, and yield the address."""
        app = web.Application()
        app.router.add_get("/ws", self._episode)
        with application(app) as url:
            yield url

    async def _episode(self, request: web.Request) -> web.WebSocketResponse:
        answers: list[Any] = []
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.open += 1
        try:
            async for frame in socket:
                message = json.loads(frame.data)
                if message["type"] == "reset":
                    answers = [*self._frames.get(message["data"]["answer"], [])]
                known = [answer for sent, answer in answers if sent == message]
                if message == {"type": "close"} or not known:
                    self.unknown += [] if message == {"type": "close"} else [message]
                    break
                await socket.send_json(known[0])
                if known[0]["data"].get("code") == "CAPACITY_REACHED":
                    break
        finally:
            self.open, self.closed = self.open - 1, self.closed + 1
            await socket.close()
        return socket


def recorded(url: str, full_url: str) -> dict[str, Any]:
    """Return the frames of all episodes with a real server, and of one with a server that has no place: (message, answer)."""

    async def episode(url: str, messages: list[dict[str, Any]]) -> list[Any]:
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/ws") as socket:
            frames = []
            for message in messages:
                await socket.send_json(message)
                frames.append([message, await socket.receive_json(timeout=30)])
            await socket.send_json({"type": "close"})
            return frames

    async def all_episodes() -> dict[str, Any]:
        frames = {name: await episode(url, messages) for name, messages in EPISODES.items()}
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{full_url}/ws") as holder:
            await holder.send_json({"type": "reset", "data": {}})
            await holder.receive_json(timeout=30)
            message = {"type": "reset", "data": {"answer": FULL}}
            async with session.ws_connect(f"{full_url}/ws") as socket:
                await socket.send_json(message)
                frames[FULL] = [[message, await socket.receive_json(timeout=30)]]
            await holder.send_json({"type": "close"})
        return frames

    loop = LoopThread("recording")
    try:
        return loop.run(all_episodes())
    finally:
        loop.stop()
