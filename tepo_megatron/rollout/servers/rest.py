"""How the servers of a fleet sleep and wake together: each is told once, when it has nothing to do, and none starts meanwhile.

A server that fails at it holds an unknown amount of memory and is ended. It is started again, like one that dies while the
others sleep, once the fleet is awake: a start takes a server's whole memory, which somebody else has until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from tepo_megatron.errors import RolloutError
from tepo_megatron.rollout.engine import ENGINE_PARTS, EnginePart
from tepo_megatron.rollout.servers.client import RequestFailed
from tepo_megatron.rollout.servers.endpoint import Endpoint
from tepo_megatron.rollout.servers.growth import GrowthLimit
from tepo_megatron.rollout.servers.member import Member
from tepo_megatron.rollout.servers.standstill import Standstill


class Rest:
    """In the fleet's event loop, but for what only looks. changed: told when something did that others wait for; standstill:
    where others start the servers; growth: ends those that have grown too far instead of putting them to sleep.

    asleep: what of the engine is; may_start: set while servers may be started.
    """

    def __init__(self, changed: asyncio.Condition, standstill: Standstill | None, growth: GrowthLimit) -> None:
        self._changed, self._standstill, self._growth = changed, standstill, growth
        self.asleep: frozenset[EnginePart] = frozenset()
        self.may_start = asyncio.Event()
        self.may_start.set()

    @property
    def state(self) -> str:
        """In words."""
        if not self.asleep:
            return "awake"
        return "asleep" if self.asleep == set(ENGINE_PARTS) else "awake but for its KV cache"

    def require_awake(self, what: str) -> None:
        """Raise RolloutError unless the engine is wholly awake."""
        if self.asleep:
            raise RolloutError(f"the engine is {self.state}, and {what} needs it to be awake; wake all of it first")

    def require_weights(self) -> None:
        """Raise RolloutError when there is no memory for weights."""
        if "weights" in self.asleep:
            raise RolloutError(f"the engine is {self.state} and cannot take weights; wake its weights first")

    async def sleep(self, members: Sequence[Member]) -> None:
        """Put all to sleep; returns when those that could not have ended. Raises RolloutError unless the engine is awake."""
        if self.asleep:
            raise RolloutError(f"the engine cannot go to sleep from being {self.state}; wake all of it first")
        self.asleep = frozenset(ENGINE_PARTS)  # from now on nothing is asked of a server
        self.may_start.clear()
        await self._until(lambda: not any(m.between or m.endpoint.in_flight for m in members))
        ended = await self._growth.end_grown([(m, m.life) for m in members if m.life is not None])
        await self._until(lambda: all(m.life is not life for m, life in ended))
        lives = None
        while lives != (lives := [m.life for m in members]):  # what is over meanwhile has to be gone as well
            if self._standstill is not None:
                await self._standstill.reach()
            await self._tell([m for m in members if not m.endpoint.asleep], lambda endpoint: endpoint.sleep())
            await self._until(lambda: not any(m.between for m in members))

    async def wake(self, members: Sequence[Member], part: EnginePart) -> None:
        """Wake a part of all that sleep. Raises RolloutError for a part whose turn it is not."""
        turn = next((p for p in ENGINE_PARTS if p in self.asleep), None)
        if part != turn:
            mend = "it is awake already" if turn is None else f"wake its {turn} first"
            raise RolloutError(f"the engine is {self.state} and its {part} cannot be woken: {mend}")
        await self._tell([m for m in members if part in m.endpoint.asleep], lambda endpoint: endpoint.wake(part))
        self.asleep -= {part}
        if not self.asleep:
            self.rise()

    def rise(self) -> None:
        """Servers may be started."""
        self.may_start.set()
        if self._standstill is not None:
            self._standstill.end()

    async def _tell(self, members: Sequence[Member], say: Callable[[Endpoint], Awaitable[None]]) -> None:
        """Say something to all that are up; a server that does not do it is ended."""
        alive = [(m, m.life) for m in members if m.life is not None]
        results = await asyncio.gather(*(say(m.endpoint) for m, _ in alive), return_exceptions=True)
        for (member, life), result in zip(alive, results, strict=True):
            if isinstance(result, RequestFailed):
                result = RolloutError(f"{member.endpoint.name} {result.what}")
            if isinstance(result, RolloutError):
                life.end(result)
                await self._until(lambda m=member, over=life: m.life is not over)  # type: ignore[misc]
            elif isinstance(result, BaseException):
                raise result

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)
