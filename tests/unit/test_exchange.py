"""Connections to servers: which requests share them, when they end, and what is sent twice. Real sockets."""

import asyncio
import time

import pytest
from aiohttp import test_utils, web

from tepo_megatron.base import exchange
from tepo_megatron.base.exchange import ExchangeFailed, HttpClient
from tepo_megatron.engines.servers.client import Client, RequestFailed
from tests.counting_servers import CountingServer, serving

SECONDS = 30.0


async def ask(http: HttpClient, path: str = "/x", repeatable: bool = True, method: str = "POST") -> int:
    return (await http.exchange(method, path, seconds=SECONDS, body=b"{}", repeatable=repeatable)).status


async def until_open(server: CountingServer, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while server.open != count:
        assert time.monotonic() < deadline, f"{server.open} connections instead of {count}"
        await asyncio.sleep(0.01)


def test_repeatable_requests_share_connections_and_others_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_SECONDS", 300.0)

    async def run(server: CountingServer) -> None:
        http = HttpClient(server.url, "key")
        for _ in range(20):
            await ask(http)
        assert server.opened == 1
        for _ in range(5):
            await ask(http, repeatable=False)
        assert server.opened == 6
        await until_open(server, 1)
        for _ in range(5):
            await asyncio.gather(*(ask(http) for _ in range(8)))
        assert server.opened <= 5 + 8 and server.requests["/x"] == 65
        await http.close()
        await until_open(server, 0)

    with serving(1) as (server,):
        asyncio.run(run(server))


def test_a_request_that_may_have_had_its_effect_is_sent_once() -> None:
    async def run(server: CountingServer) -> None:
        http = HttpClient(server.url)
        await ask(http)  # leaves a connection that could be used
        server.drops = {"/update", "/generate"}
        with pytest.raises(ExchangeFailed, match="disconnected"):
            await ask(http, "/update", repeatable=False)
        assert server.requests["/update"] == 1
        with pytest.raises(ExchangeFailed, match="disconnected"):
            await ask(http, "/generate")
        assert server.requests["/generate"] == 2
        await http.close()

    with serving(1) as (server,):
        asyncio.run(run(server))


def test_to_close_a_client_ends_its_requests_at_once_with_an_error() -> None:
    async def run(server: CountingServer) -> None:
        client = Client(server.url, "key", request_seconds=300.0, heartbeat_timeout=300.0)
        await client.exchange("GET", "/x", repeatable=True)
        server.seconds = 300.0
        sent = [asyncio.create_task(client.exchange("POST", "/x", {}, repeatable=repeatable)) for repeatable in (True, False)]
        deadline = time.monotonic() + SECONDS
        while server.requests["/x"] < 3:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await client.close()
        ends = await asyncio.wait_for(asyncio.gather(*sent, return_exceptions=True), SECONDS)
        assert [type(end) for end in ends] == [RequestFailed, RequestFailed], ends
        with pytest.raises(RequestFailed, match=r"broke off /x \(the connections to it were closed\)"):
            await client.exchange("GET", "/x", repeatable=True)
        await client.close()

    with serving(1) as (server,):
        asyncio.run(run(server))


def test_a_server_that_wakes_between_question_and_answer_is_healthy() -> None:
    """Asleep it is only asked whether it answers at all, which it may do with 405."""

    async def run() -> None:
        asked, woken, healthy = (asyncio.Event() for _ in range(3))

        async def answer(request: web.Request) -> web.Response:
            if request.method == "HEAD":
                asked.set()
                await woken.wait()
                return web.Response(status=405)
            healthy.set()
            return web.Response()

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with test_utils.TestServer(app) as server:
            client = Client(str(server.make_url("")).rstrip("/"), "key", request_seconds=SECONDS, heartbeat_timeout=SECONDS)
            await client.pause()
            watch = asyncio.create_task(client.wait_unhealthy())
            await asyncio.wait_for(asked.wait(), SECONDS)
            client.resume()
            woken.set()
            asked_again = asyncio.create_task(healthy.wait())
            done, _ = await asyncio.wait({watch, asked_again}, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
            watch.cancel()
            await client.close()
            assert done == {asked_again}, done

    asyncio.run(run())
