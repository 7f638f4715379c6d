"""Restart servers whose memory has grown too far, at moments when they have nothing to do.

A long run must not end because an engine keeps memory. What a healthy server needs depends on the model, the engine and its
settings, so the limit is relative: each start of a server is measured for the first time after it has answered a batch of
requests, when what is set up lazily is there, and is ended once it holds a limit's worth more than that. The default of 4 GiB
is ten times what the caches of a vLLM server were seen to take after that point (docs/faults.md). Samples depend on weights,
prompt and seed alone, so a run is the same with and without such a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from tepo_megatron.rollout.servers.endpoint import Endpoint
from tepo_megatron.rollout.servers.member import Life, Member, Planned

_GIB = 2**30


class GrowthLimit:
    """Ends the lives of servers that have grown.

    Args:
        gib: GiB of resident memory that a server may hold beyond what it held first. 0: any number.
    """

    def __init__(self, gib: float) -> None:
        self._gib = gib
        self._first: WeakKeyDictionary[Life, int] = WeakKeyDictionary()  # bytes

    async def end_grown(self, idle: Iterable[tuple[Member[Endpoint], Life]]) -> list[tuple[Member[Endpoint], Life]]:
        """End those of the servers that have grown too far. `Member.keep` starts them again.

        Args:
            idle: Servers without requests, in the life in which they are to be measured. One that has not answered a request
                in that life is passed over, and so is one whose memory is not known here (`servers/remote.py`).

        Returns:
            Those that were ended; they may still be up when it returns.
        """
        ended = []
        for member, life in idle if self._gib else ():
            if member.life is not life or not member.endpoint.answered:
                continue
            now = await asyncio.to_thread(lambda endpoint: endpoint.resident_bytes, member.endpoint)
            first = self._first.setdefault(life, now)
            if now - first > self._gib * _GIB:
                life.end(Planned(self._why(member.endpoint.name, first, now)))
                ended.append((member, life))
        return ended

    def _why(self, name: str, first: int, now: int) -> str:
        return (
            f"{name} holds {now / _GIB:.2f} GiB, and held {first / _GIB:.2f} GiB after its first requests: it has grown by "
            f"more than rollout.server.restart_after_growth_gib={self._gib:g}"
        )
