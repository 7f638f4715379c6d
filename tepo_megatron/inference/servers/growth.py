"""Restart servers whose memory has grown too far, at moments when they are idle.

A long run must not end because an engine leaks memory. The memory that a healthy server needs depends on the model, the engine
and its settings, so the limit is relative. The baseline of each incarnation is measured after it has answered a batch of
requests, because engines allocate lazily. The incarnation is ended once it holds more than the limit beyond that baseline. The
default of 4 GiB is ten times what the caches of a vLLM server were seen to take after that point (docs/faults.md). Samples
depend on weights, prompt and seed alone, so such a restart does not change the results of a run.
"""

import asyncio
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from tepo_megatron.inference.servers.endpoint import Endpoint
from tepo_megatron.inference.servers.slot import Incarnation, PlannedRestart, ServerSlot

_GIB = 2**30
LiveServer = tuple[ServerSlot[Endpoint], Incarnation]


class GrowthLimit:
    """Ends incarnations of servers whose resident memory has grown beyond a limit."""

    def __init__(self, gib: float) -> None:
        self._gib = gib
        self._first: WeakKeyDictionary[Incarnation, int] = WeakKeyDictionary()  # baseline in bytes

    async def end_grown(self, idle: Iterable[LiveServer]) -> list[LiveServer]:
        """End the servers that have grown too far. The first call that sees an incarnation records its baseline."""
        ended = []
        for member, incarnation in idle if self._gib else ():
            if member.incarnation is not incarnation or not member.endpoint.answered:
                continue
            now = await asyncio.to_thread(lambda endpoint: endpoint.resident_bytes, member.endpoint)
            first = self._first.setdefault(incarnation, now)
            if now - first > self._gib * _GIB:
                incarnation.end(PlannedRestart(self._why(member.endpoint.name, first, now)))
                ended.append((member, incarnation))
        return ended

    def _why(self, name: str, first: int, now: int) -> str:
        return (
            f"{name} holds {now / _GIB:.2f} GiB, and held {first / _GIB:.2f} GiB after its first requests: it has grown by "
            f"more than rollout.server.restart_after_growth_gib={self._gib:g}"
        )
