"""Observe a pool of servers: their states, and their own metrics. Nothing here changes a server or waits long for one."""

import asyncio
import time

from tepo_megatron.errors import RolloutError
from tepo_megatron.inference.report import EngineReport, ServerReport, ServerState
from tepo_megatron.inference.servers.client import RequestFailed
from tepo_megatron.inference.servers.endpoint import Endpoint
from tepo_megatron.inference.servers.pool import ServerPool
from tepo_megatron.inference.servers.slot import ServerSlot

ROUTE = "/metrics"  # of vLLM and of SGLang
MOST_SERVER_BYTES = 4 * 2**20  # of the text of one server
UP, BETWEEN, LOST = 1.0, 0.5, 0.0  # takes requests; is being started or ended; is not started again


class LoadMeter:
    """The load of each server since the last reading. It only reads counters that the servers' event loop keeps anyway."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool, self._read_at = pool, time.monotonic()
        self._tokens: dict[int, int] = {}

    def read(self) -> dict[str, float]:
        """Return state, most requests at once, response tokens per second and restarts of each server, by key of the record."""
        now = time.monotonic()
        seconds, self._read_at = now - self._read_at, now
        found: dict[str, float] = {}
        for place, slot in enumerate(self._pool.slots):
            endpoint, tokens = slot.endpoint, slot.endpoint.response_tokens
            found |= {
                f"server/{place}/up": _up(slot),
                f"server/{place}/queue": float(endpoint.most_in_flight),
                f"server/{place}/tokens_per_second": (tokens - self._tokens.get(place, 0)) / max(seconds, 1e-9),
                f"server/{place}/restarts": float(slot.restart_count),
            }
            self._tokens[place], endpoint.most_in_flight = tokens, endpoint.in_flight
        return found


def _up(slot: ServerSlot[Endpoint]) -> float:
    return UP if slot.up else LOST if slot.lost is not None else BETWEEN


async def observe(pool: ServerPool, seconds: float) -> EngineReport:
    """Return the state of a pool, in whose event loop this runs. Metrics that do not come within `seconds` are left out."""
    asked = [slot for slot in pool.slots if slot.up and not slot.endpoint.asleep]
    texts = await asyncio.gather(*(_text(slot.endpoint, seconds) for slot in asked))
    return EngineReport(
        [_report(slot, pool.version) for slot in pool.slots],
        len(pool.waiting),
        pool.version,
        {slot.endpoint.name: text for slot, text in zip(asked, texts, strict=True) if text is not None},
    )


async def _text(endpoint: Endpoint, seconds: float) -> str | None:
    client = endpoint.client
    if client is None:
        return None
    try:
        answer = await client.exchange("GET", ROUTE, most_bytes=MOST_SERVER_BYTES, seconds=seconds, repeatable=True)
    except (RequestFailed, RolloutError):
        return None
    return answer.text


def _report(slot: ServerSlot[Endpoint], version: int) -> ServerReport:
    endpoint = slot.endpoint
    return ServerReport(endpoint.name, _state(slot, version), endpoint.version, endpoint.in_flight, slot.restart_count)


def _state(slot: ServerSlot[Endpoint], version: int) -> ServerState:
    if slot.lost is not None:
        return "lost"
    if not slot.up:
        return "starting"
    if slot.endpoint.asleep:
        return "asleep"
    return "serving" if slot.endpoint.version == version else "waiting_for_weights"
