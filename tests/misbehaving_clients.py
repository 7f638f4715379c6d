"""Every client of ours against every kind of misbehaving server, in a process of its own, whose memory is measured.

    python -m tests.misbehaving_clients URL PAIRS

PAIRS is a JSON list of [client, kind]. Prints one JSON object for each: duration, outcome, message, and by how many MiB the
peak resident size grew. Pairs that last until their deadline run concurrently; pairs that may take memory run alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import RolloutError
from tepo_megatron.inference.engine_api import EngineApi
from tepo_megatron.inference.partial import GenerationRequest
from tepo_megatron.inference.servers import client as client_module
from tepo_megatron.inference.servers import process as process_module
from tepo_megatron.inference.servers.client import Client, RequestFailed, healthy
from tepo_megatron.inference.servers.endpoint import Endpoint
from tepo_megatron.inference.servers.process import ServerProcess
from tepo_megatron.inference.servers.server import ServerAddress
from tepo_megatron.inference.sglang import SglangApi
from tepo_megatron.inference.vllm import VllmApi
from tepo_megatron.rewards.remote import HttpTerm
from tepo_megatron.rewards.terms import Response
from tepo_megatron.types import Prompt, SamplingParams
from tests.graded import decode, rollout
from tests.misbehaving import ENDLESS

DEADLINE = 1.0  # seconds, of every exchange
KEY = "secret-key"
ASK = GenerationRequest(Prompt(id=0, token_ids=(4, 5), answer=""), SamplingParams(samples=1, max_tokens=5), 0)


class Elsewhere:
    """A server that others started."""

    name, running, resident_bytes, again = "a server", True, 0, ""

    def __init__(self, url: str) -> None:
        self.url = url

    async def wait_ready(self) -> ServerAddress:
        return ServerAddress(self.url, KEY)

    async def failure(self, what: str) -> RolloutError:
        return RolloutError(f"{self.name} {what}")


def reward(url: str) -> object:
    async def grade() -> object:
        limits = {"timeout_seconds": DEADLINE, "backoff_seconds": 0.0}
        term = HttpTerm(url, attempts=1, key_variable="TEPO_TEST_KEY", concurrency=1, **limits)
        try:
            return await term.grade([Response(rollout("because", "7"), decode)])
        finally:
            await term.close()

    return asyncio.run(grade())


def engine(api: Callable[[], EngineApi], act: Callable[[Endpoint], Any]) -> Callable[[str], object]:
    """Return a client that calls an engine's endpoint.

    Args:
        api: Constructor of the engine's API.
        act: Call to make.
    """

    async def run(url: str) -> object:
        cfg = ServerConfig(request_seconds=DEADLINE, heartbeat_timeout=DEADLINE)
        endpoint = Endpoint(Elsewhere(url), api(), cfg, max_model_len=64)  # type: ignore[arg-type]
        endpoint.client = Client(url, KEY, request_seconds=DEADLINE, heartbeat_timeout=DEADLINE)
        try:
            return await act(endpoint)
        finally:
            await endpoint.client.close()

    return lambda url: asyncio.run(run(url))


async def generated(endpoint: Endpoint) -> object:
    return (await endpoint.generate([ASK])).decode()


def illness(url: str) -> object:
    async def run() -> str:
        client = Client(url, KEY, request_seconds=DEADLINE, heartbeat_timeout=DEADLINE)
        try:
            return await asyncio.wait_for(client.wait_unhealthy(), 3 * DEADLINE)
        finally:
            await client.close()

    with contextlib.suppress(TimeoutError):  # the server is well
        raise RequestFailed(asyncio.run(run()))
    return None


def health(url: str) -> object:
    return asyncio.run(healthy(url))


def wait_ready(url: str) -> object:
    """Wait for a server whose process lives elsewhere than its health URL."""
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(
            ["sleep", "600"],
            env=dict(os.environ),
            health_url=f"{url}/health",
            log_path=Path(folder) / "log",
            ready_seconds=DEADLINE,
            name="it",
        )
        server.start()
        try:
            server.wait_ready()
        finally:
            server.stop(at_once=True)
    return None


CLIENTS: dict[str, Callable[[str], object]] = {
    "reward": reward,
    "vllm, ready": engine(VllmApi, lambda endpoint: endpoint.ready()),
    "vllm, generate": engine(VllmApi, generated),
    "vllm, finish_update": engine(VllmApi, lambda endpoint: endpoint.finish_update()),
    "vllm, checksums": engine(VllmApi, lambda endpoint: endpoint.checksums()),
    "vllm, sleep": engine(VllmApi, lambda endpoint: endpoint.sleep()),
    "sglang, ready": engine(SglangApi, lambda endpoint: endpoint.ready()),
    "sglang, generate": engine(SglangApi, generated),
    "sglang, finish_update": engine(SglangApi, lambda endpoint: endpoint.finish_update()),
    "illness": illness,
    "healthy": health,
    "wait_ready": wait_ready,
}
ASKS_FOR_HEALTH = ("illness", "healthy", "wait_ready")  # clients that wait for long and read little


def memory(what: str) -> float:
    """Return VmRSS or VmHWM of this process in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1024


def measured(name: str, kind: str, url: str) -> dict[str, Any]:
    """Run one client against one kind and return its measurements.

    Args:
        name: A name in CLIENTS.
        kind: Kind of misbehaviour.
        url: URL below which the kinds are served.
    """
    begin, before = time.monotonic(), memory("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak size
    try:
        ended, said = "returned", repr(CLIENTS[name](f"{url}/{kind}"))
    except Exception as e:
        ended, said = type(e).__name__, str(e)
    grown = memory("VmHWM") - before
    return {
        "client": name, "kind": kind, "seconds": time.monotonic() - begin, "ended": ended, "said": said, "grown": grown,
    }  # fmt: skip


def main() -> None:
    url = sys.argv[1]
    client_module.HEALTHY_SECONDS = process_module.HEALTH_SECONDS = DEADLINE
    pairs = [(name, kind) for name, kind in json.loads(sys.argv[2])]
    lasting = [(name, kind) for name, kind in pairs if kind in ENDLESS or name in ASKS_FOR_HEALTH]
    with ThreadPoolExecutor(48) as threads:
        for found in threads.map(lambda pair: measured(*pair, url), lasting):
            print(json.dumps(found), flush=True)
    for name, kind in pairs:
        if (name, kind) not in lasting:
            print(json.dumps(measured(name, kind, url)), flush=True)


if __name__ == "__main__":
    main()
