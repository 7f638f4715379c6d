"""The trainer's turn on machines where `tepo serve` keeps the servers: nothing is started there, and nothing is awake.

A `tepo serve` starts a dead server again whenever it likes, which takes a server's whole memory. So whoever wants the devices
says in the rendezvous folder which servers it keeps, and waits until all that keep servers there have answered: from then on
they start none, have ended all others, and ask those for a connection instead of their health.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tepo_megatron.errors import RolloutError
from tepo_megatron.rollout.servers.rendezvous import Rendezvous

POLL_SECONDS = 0.1


class Standstill:
    """run: who has the devices; starts: of the servers that it has now (`Record.start`); seconds: for all to answer."""

    def __init__(self, rendezvous: Rendezvous, run: str, starts: Callable[[], Sequence[str]], seconds: float) -> None:
        self._rendezvous, self._run, self._starts, self._seconds = rendezvous, run, starts, seconds

    async def reach(self) -> None:
        """Return when nothing is there, nor on its way, but servers that the run has now. Raises RolloutError."""
        turn = await asyncio.to_thread(self._rendezvous.take_turn, self._run, self._starts())
        deadline = time.monotonic() + self._seconds
        while missing := [k for k, said in (await asyncio.to_thread(self._rendezvous.answers)).items() if said != turn.token]:
            if time.monotonic() > deadline:
                files = ", ".join(f"{keeper}.keeper" for keeper in missing)
                raise RolloutError(
                    f"rollout.colocate: {', '.join(missing)} (host and pid of `tepo serve`) did not say within "
                    f"{self._seconds:g} s that the devices are free; look at its log in {self._rendezvous.folder}, and if it "
                    f"was killed, remove {files} there"
                )
            await asyncio.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Servers may be started again. Does nothing where it is not this run's turn."""
        self._rendezvous.end_turn(self._run)
