"""A small inference server of our own, a real process behind real HTTP, that fails when told to: what the fleet is tested on.

    python -m tests.scripted_server PORT

Its samples depend on (prompt, seed) alone. It keeps the ids of the groups that it delivered in full.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from tepo_megatron.config import ServerConfig
from tepo_megatron.rollout.engine import INITIAL_VERSION, EnginePart, Launch, Send, StaleWeights
from tepo_megatron.rollout.samples import checked_rollout, parsed
from tepo_megatron.types import Prompt, Rollout, SamplingParams

KEY = "TEPO_SCRIPTED_KEY"


class Handler(BaseHTTPRequestHandler):
    """behaviour: errors (answers with 500 to come), slow (seconds of an answer), loading (seconds of a load), refuse or die (in
    the next update or change of sleep; at: in which of its requests). loaded: names of the files of the last update. asleep:
    what it has released; like SGLang it dies of being told twice, or while it samples.
    """

    version = INITIAL_VERSION
    loading: ClassVar[Any] = None  # names, in an update
    loaded: ClassVar[Any] = None
    asleep: ClassVar[list[str]] = []
    sampling: ClassVar[int] = 0
    behaviour: ClassVar[dict[str, Any]] = {}
    lock = threading.Lock()

    def do_GET(self) -> None:
        self.answer(200, {"version": Handler.version, "loaded": Handler.loaded, "asleep": Handler.asleep})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {os.environ[KEY]}":
            return self.answer(401, {"message": "no key"})
        if self.path == "/behave":
            Handler.behaviour = body
            if "version" in body:
                Handler.version = body["version"]
            return self.answer(200, {})
        if self.path in ("/sleep", "/wake/weights", "/wake/kv_cache"):
            return self.rest()
        if self.path in ("/begin", "/load", "/update"):
            return self.update(body)
        with Handler.lock:
            errors = Handler.behaviour.get("errors", 0)
            Handler.behaviour["errors"] = max(0, errors - 1)
        if errors:
            return self.answer(500, {"message": "out of order"})
        if body["max_tokens"] > 100:
            return self.answer(400, {"message": "max_tokens is too large"})
        with Handler.lock:
            Handler.sampling += 1
        time.sleep(Handler.behaviour.get("slow", 0.0))
        with Handler.lock:
            Handler.sampling -= 1
        if Handler.asleep:
            os._exit(4)
        chance = random.Random(f"{body['seed']}/{body['prompt']}")
        samples = [[chance.randrange(3, 60) for _ in range(body["max_tokens"])] for _ in range(body["samples"])]
        return self.answer(200, {"samples": samples, "version": Handler.version})

    def rest(self) -> None:
        """Sleep, or wake in part."""
        if self.fails("cannot do that"):
            return
        part = self.path.rpartition("/")[2]
        if Handler.sampling or (part == "sleep") == bool(Handler.asleep) or (part != "sleep" and part != Handler.asleep[0]):
            os._exit(4)
        Handler.asleep = ["weights", "kv_cache"] if part == "sleep" else Handler.asleep[1:]
        self.answer(200, {})

    def fails(self, why: str) -> bool:
        """Whether it was told to refuse or to die of this request, and does."""
        if self.path == Handler.behaviour.get("at", "/update"):
            if Handler.behaviour.pop("refuse", False):
                self.answer(500, {"message": why})
                return True
            if Handler.behaviour.pop("die", False):
                os._exit(3)
        return False

    def update(self, body: dict[str, Any]) -> None:
        """Begun, loaded, or finished; each only when it is its turn."""
        if self.fails("cannot load these"):
            return
        if Handler.asleep[:1] == ["weights"]:
            os._exit(4)
        if (Handler.loading is None) != (self.path == "/begin"):
            return self.answer(500, {"message": "out of turn"})
        if self.path == "/begin":
            Handler.loading = []
        elif self.path == "/load":
            time.sleep(Handler.behaviour.get("loading", 0.0))
            Handler.loading += body["files"]
        else:
            Handler.version, Handler.loaded, Handler.loading = body["version"], Handler.loading, None
        return self.answer(200, {})

    def answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class ScriptedApi:
    """See `engine.EngineApi`."""

    name = "the scripted server"

    def command(self, cfg: ServerConfig, launch: Launch, port: int) -> list[str]:
        return [sys.executable, "-m", "tests.scripted_server", str(port)]

    def environment(self, cfg: ServerConfig, launch: Launch, inherited: Mapping[str, str], key: str) -> dict[str, str]:
        return {**inherited, KEY: key, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}

    async def prepare(self, send: Send) -> None: ...

    async def generate(self, send: Send, prompt: Prompt, sampling: SamplingParams, seed: int, version: int) -> list[Rollout]:
        body = {"prompt": prompt.id, "seed": seed, "samples": sampling.samples, "max_tokens": sampling.max_tokens}
        answer = await send("POST", "/generate", body)
        if answer["version"] != version:
            raise StaleWeights(f"served version {answer['version']} instead of {version}")

        def rollouts(answer: Any) -> list[Rollout]:
            return [checked_rollout(prompt, ids, [-1.0] * len(ids), "length", sampling, version) for ids in answer["samples"]]

        return parsed(answer, prompt, self.name, rollouts)

    async def begin_update(self, send: Send) -> None:
        await send("POST", "/begin", {})

    async def load(self, send: Send, files: Sequence[Path]) -> None:
        await send("POST", "/load", {"files": [file.name for file in files]})

    async def finish_update(self, send: Send, version: int) -> None:
        await send("POST", "/update", {"version": version})

    async def sleep(self, send: Send) -> None:
        await send("POST", "/sleep", {})

    async def wake(self, send: Send, part: EnginePart) -> None:
        await send("POST", f"/wake/{part}", {})


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
