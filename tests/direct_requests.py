"""Requests to one server of a fleet over a connection of their own, past the fleet."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from tepo_megatron.engines.servers.client import Client
from tepo_megatron.engines.servers.fleet import Fleet

Answer = TypeVar("Answer")
SECONDS = 120.0  # time limit of a request


def connected(fleet: Fleet, server: int, use: Callable[[Client], Awaitable[Answer]]) -> Answer:
    """Return the result of `use`, called with a connection to one server at the address of its last readiness."""
    address = fleet.endpoints[server].address
    assert address is not None, "it has never been ready"

    async def run() -> Answer:
        client = Client(address.url, address.key, request_seconds=SECONDS, heartbeat_timeout=SECONDS)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def ask(fleet: Fleet, server: int, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send one request with the server's key and return its JSON answer.

    Raises:
        RequestFailed: The server refused, or did not answer.
    """
    return connected(fleet, server, lambda client: client.send(method, path, body))
