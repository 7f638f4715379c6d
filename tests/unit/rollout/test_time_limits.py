"""The time limit of a generation request grows with the tokens that it asks for."""

import asyncio
import socket

import pytest

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.types import Prompt, SamplingParams
from tepo_megatron.config import ServerConfig
from tepo_megatron.engines.engine import GenerationRequest
from tepo_megatron.engines.servers.client import Client, RequestFailed
from tepo_megatron.engines.servers.endpoint import Endpoint
from tepo_megatron.engines.servers.server import ServerAddress
from tepo_megatron.engines.vllm import VllmApi

KEY = "secret-key"


class Elsewhere:
    name, running, resident_bytes, again = "a server", True, 0, ""

    def __init__(self, url: str) -> None:
        self.url = url

    async def wait_ready(self) -> ServerAddress:
        return ServerAddress(self.url, KEY)

    async def failure(self, what: str) -> RolloutError:
        return RolloutError(f"{self.name} {what}")


def test_a_small_request_has_the_limit_of_the_key() -> None:
    cfg = ServerConfig(request_seconds=300.0, concurrency=64)
    assert {cfg.generation_limit(tokens) for tokens in (1, 1000, 15_625)} == {300.0}
    assert cfg.generation_limit(15_626) > 300.0


@pytest.mark.parametrize(("samples", "limit"), [(1, "0.2 s"), (2, "0.4 s")])
def test_a_silent_server_is_given_the_time_of_the_tokens(samples: int, limit: str) -> None:
    """The message names the limit that the request had. A control request keeps that of the key."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cfg = ServerConfig(request_seconds=0.2, concurrency=1000)
        ask = GenerationRequest(Prompt(0, (4, 5), ""), SamplingParams(samples=samples, max_tokens=1000), seed=0)

        async def fails() -> list[str]:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            endpoint = Endpoint(Elsewhere(url), VllmApi(), cfg, max_model_len=2000)  # type: ignore[arg-type]
            endpoint.client = Client(url, KEY, request_seconds=cfg.request_seconds, heartbeat_timeout=5.0)
            try:
                with pytest.raises(RequestFailed) as generation:
                    await endpoint.generate([ask])
                with pytest.raises(RequestFailed) as control:
                    await endpoint.client.send("GET", "/version")
            finally:
                await endpoint.client.close()
            return [generation.value.what, control.value.what]

        generation, control = asyncio.run(asyncio.wait_for(fails(), 30))
    assert f"within {limit}; raise rollout.server.request_seconds" in generation
    assert "within 0.2 s; raise rollout.server.request_seconds" in control
