"""Requests that wait for a server: who gets a slot, how often they wake, and how many connections they take. Real sockets."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tepo_megatron.base.types import Prompt, SamplingParams
from tepo_megatron.config import RolloutConfig, UrlServerConfig
from tepo_megatron.engines.engine import GenerationRequest
from tepo_megatron.engines.servers.endpoint import Endpoint
from tepo_megatron.engines.servers.fleet import Fleet
from tepo_megatron.engines.servers.pool import ServerPool
from tepo_megatron.engines.servers.rendezvous import KEY_VARIABLE
from tepo_megatron.engines.servers.server import NamedServer
from tepo_megatron.engines.vllm import VllmApi
from tests.counting_servers import CountingServer, serving

SECONDS = 60.0
PROMPTS = [Prompt(id=i, token_ids=(4, 5), answer="") for i in range(200)]
SAMPLING = SamplingParams(samples=1, max_tokens=4)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k" * 32)


def endpoints_of(
    servers: list[CountingServer], concurrency: int, api: Callable[[], VllmApi] = VllmApi
) -> tuple[list[Endpoint], RolloutConfig]:
    urls = [server.url for server in servers]
    section = UrlServerConfig(urls=urls, concurrency=concurrency, restarts=0, ready_seconds=SECONDS)
    ends = [Endpoint(NamedServer(f"server {i}", section, url), api(), section, 64) for i, url in enumerate(urls)]
    return ends, RolloutConfig(only=True, servers=len(urls), min_servers=1, server=section)


@contextmanager
def pool_of(servers: list[CountingServer], concurrency: int) -> Iterator[ServerPool]:
    pool = ServerPool(*endpoints_of(servers, concurrency))
    try:
        pool.start()
        pool.wait_ready()
        yield pool
    finally:
        pool.close()


def test_the_least_loaded_server_comes_first_and_the_avoided_one_last() -> None:
    async def order(pool: ServerPool) -> None:
        first = [(await pool.acquire(None))[0] for _ in range(4)]
        assert {slot.endpoint for slot in first} == set(pool.endpoints)
        await pool.release(first[2])
        assert (await pool.acquire(None))[0] is first[2]
        await pool.release(first[2])
        assert (await pool.acquire(first[2].endpoint))[0] is not first[2]
        rest = [(await pool.acquire(first[2].endpoint))[0] for _ in range(2)]
        assert first[2] not in rest
        assert (await pool.acquire(first[2].endpoint))[0] is first[2], "it is better than none"

    with serving(4) as servers, pool_of(servers, concurrency=2) as pool:
        pool.loop.run(order(pool))


def test_cancelled_requests_take_no_slot_with_them() -> None:
    async def cancel(pool: ServerPool) -> None:
        held = [(await pool.acquire(None))[0] for _ in range(4)]
        waiting = [asyncio.create_task(pool.acquire(None)) for _ in range(40)]
        await asyncio.sleep(0)
        for slot in held:
            await pool.release(slot)  # four of those that wait have a slot now, and have not run yet
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [endpoint.in_flight for endpoint in pool.endpoints] == [0, 0]
        again = await asyncio.wait_for(asyncio.gather(*(pool.acquire(None) for _ in range(4))), SECONDS)
        assert len(again) == 4

    with serving(2) as servers, pool_of(servers, concurrency=2) as pool:
        pool.loop.run(cancel(pool))


def test_a_server_that_ends_between_a_groups_two_requests_costs_no_sample() -> None:
    """vLLM samples the group, ends, and the client is closed before the version of its weights is asked for."""
    with serving(2) as servers:
        ended: list[Endpoint] = []

        class Ending(VllmApi):
            async def generate(self, send: Any, exchange: Any, ask: GenerationRequest, version: int) -> Any:
                async def ending(method: str, path: str, *others: Any, **options: Any) -> Any:
                    answer = await exchange(method, path, *others, **options)
                    if path == "/v1/completions" and ask.prompt.id == 7 and not ended:
                        ended.append(next(endpoint for endpoint in endpoints if endpoint.api is self))
                        await asyncio.to_thread(servers[endpoints.index(ended[0])].stop)
                        async with asyncio.timeout(SECONDS):
                            while ended[0].client is not None:
                                await asyncio.sleep(0.01)
                    return answer

                return await super().generate(send, ending, ask, version)

        endpoints, cfg = endpoints_of(servers, 4, Ending)
        with Fleet(endpoints, cfg) as fleet:
            fleet.start()
            fleet.wait_ready()
            rollouts = fleet.generate(PROMPTS, SAMPLING, 0)
            events = fleet.take_events()
    assert [r.prompt_id for r in rollouts] == [prompt.id for prompt in PROMPTS] and len(ended) == 1
    assert [endpoint.in_flight for endpoint in endpoints] == [0, 0], "a failed request keeps its slot, or frees two"
    lost = [event for event in events if event.startswith("prompt 7 is sampled again")]
    assert len(lost) == 1 and "broke off /weight_info (the connections to it were closed)" in lost[0], events


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from tests.unit.rollout.test_slots import *
servers = [type("Server", (), {"url": url})() for url in sys.argv[3:]]
endpoints, cfg = endpoints_of(servers, concurrency=100)
with Fleet(endpoints, cfg) as fleet:
    fleet.start()
    fleet.wait_ready()
    events = fleet.take_events()
    print(len(fleet.generate(PROMPTS * 2, SAMPLING, 0)), *events, *fleet.take_events(), sep="|")
"""


@pytest.mark.full
@pytest.mark.parametrize(("soft", "hard"), [(160, 2048), (160, 160)])
def test_more_requests_than_open_files_raise_the_limit_or_wait(soft: int, hard: int) -> None:
    with serving(4) as servers:
        for server in servers:
            server.seconds = 0.5  # all at once, if nothing limits them
        words = [sys.executable, "-c", FEW_FILES, str(soft), str(hard), *(server.url for server in servers)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=120, env=dict(os.environ))
        most = sum(server.most_open for server in servers)
    made, *events = ended.stdout.strip().split("|")
    assert made == "400", ended.stdout + ended.stderr
    if hard > soft:
        assert events == [] and most > 300
    else:
        assert most < 160 and len(events) == 1
        assert events[0].startswith("only ") and "a process may open 160 files here" in events[0] and "ulimit -n" in events[0]
