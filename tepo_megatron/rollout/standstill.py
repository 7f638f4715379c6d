"""The trainer's turn on machines where `tepo serve` keeps the servers: nothing is started there, and nothing is awake.

A `tepo serve` starts a dead server again whenever it likes, which takes a server's whole memory. So whoever wants the devices
says so in the rendezvous folder, and waits until each of those that keep servers there has answered: from then on it starts
none, has ended those that nobody took, and asks the others for a connection instead of their health.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from tepo_megatron.errors import RolloutError
from tepo_megatron.rollout.rendezvous import Rendezvous

POLL_SECONDS = 0.1


class Standstill:
    """run: who has the devices; keepers: of the servers that it has or had (`Record.keeper`); seconds: for all to answer."""

    def __init__(self, rendezvous: Rendezvous, run: str, keepers: Callable[[], Iterable[str]], seconds: float) -> None:
        self._rendezvous, self._run, self._keepers, self._seconds = rendezvous, run, keepers, seconds

    async def reach(self) -> None:
        """Return when no server is on its way up or down anywhere. Raises RolloutError."""
        token = await asyncio.to_thread(self._rendezvous.still, self._run)
        waited_for = {*self._keepers(), *(record.keeper for record in await asyncio.to_thread(self._rendezvous.records))}
        deadline = time.monotonic() + self._seconds
        while missing := [k for k in sorted(waited_for) if self._rendezvous.answer(k) != token]:
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"rollout.colocate: the devices of {', '.join(missing)} (host and pid of `tepo serve`) are not free "
                    f"{self._seconds:g} s after their servers were to stand still; look whether it lives, and at its log in "
                    f"{self._rendezvous.folder}"
                )
            await asyncio.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Servers may be started again. Does nothing where it is not this run's turn."""
        self._rendezvous.go_on(self._run)
