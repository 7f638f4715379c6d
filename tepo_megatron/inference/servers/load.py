"""Measure what the servers of a pool do, for the record of each step."""

import time

from tepo_megatron.inference.servers.endpoint import Endpoint
from tepo_megatron.inference.servers.pool import ServerPool
from tepo_megatron.inference.servers.slot import ServerSlot

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
                f"server/{place}/up": _state(slot),
                f"server/{place}/queue": float(endpoint.most_in_flight),
                f"server/{place}/tokens_per_second": (tokens - self._tokens.get(place, 0)) / max(seconds, 1e-9),
                f"server/{place}/restarts": float(slot.restart_count),
            }
            self._tokens[place], endpoint.most_in_flight = tokens, endpoint.in_flight
        return found


def _state(slot: ServerSlot[Endpoint]) -> float:
    return UP if slot.up else LOST if slot.lost is not None else BETWEEN
