"""Put the servers of a fleet to sleep and wake them together. Idle servers get one call each, and none starts meanwhile.

A server that fails to sleep or wake holds an unknown amount of memory, so it is ended. It is restarted once the fleet is awake,
like a server that dies while the others sleep: a start takes a server's whole memory, which the trainer uses until then.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.loop import time_limit
from tepo_megatron.engines.engine import ENGINE_PARTS, EnginePart
from tepo_megatron.engines.servers.client import RequestFailed
from tepo_megatron.engines.servers.endpoint import Endpoint
from tepo_megatron.engines.servers.listener import RunListener
from tepo_megatron.engines.servers.slot import Incarnation, PlannedRestart, ServerSlot

ABORT_SECONDS = 0.5  # between abort calls: repeated for requests that were still on their way to the server
_GIB = 2**30
LiveServer = tuple[ServerSlot[Endpoint], Incarnation]


class GrowthLimit:
    """Ends incarnations of idle servers whose resident memory has grown too far, because engines may leak memory.

    The memory that a healthy server needs depends on the model, the engine and its settings, so the limit is relative. The
    baseline of each incarnation is measured after it has answered a batch of requests, because engines allocate lazily. The
    default of 4 GiB is ten times what the caches of a vLLM server were seen to take after that point (docs/faults.md). Samples
    depend on weights, prompt and seed alone, so such a restart does not change the results of a run.
    """

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


async def until(changed: asyncio.Condition, condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until a condition holds, which may become true when `changed` is notified.

    Raises RolloutError, which names `what` should have come, if there is no notification within the seconds.
    """
    async with changed:
        while not condition():
            try:
                async with time_limit(seconds):
                    await changed.wait()
            except TimeoutError:
                raise RolloutError(f"{what}: nothing has changed for {seconds:g} s") from None


class SleepController:
    """Controller of the fleet's sleep state. Methods that change it run in the fleet's event loop."""

    def __init__(self, changed: asyncio.Condition, listener: RunListener | None, growth: GrowthLimit, seconds: float) -> None:
        self._changed, self._listener, self._growth, self._seconds = changed, listener, growth, seconds
        self.asleep: frozenset[EnginePart] = frozenset()
        self.may_start = asyncio.Event()
        self.may_start.set()

    @property
    def state(self) -> str:
        """Describe the sleep state in words, for messages."""
        if not self.asleep:
            return "awake"
        return "asleep" if self.asleep == set(ENGINE_PARTS) else "awake but for its KV cache"

    def require_awake(self, what: str) -> None:
        """Raise RolloutError unless all parts of the engine are awake."""
        if self.asleep:
            raise RolloutError(f"the engine is {self.state}, and {what} needs it to be awake; wake all of it first")

    def require_weights(self) -> None:
        """Raise RolloutError if the memory of the weights is released, so that no weights can be loaded."""
        if "weights" in self.asleep:
            raise RolloutError(f"the engine is {self.state} and cannot take weights; wake its weights first")

    async def sleep(self, members: Sequence[ServerSlot], abort: bool = False) -> None:
        """Put all servers to sleep. Returns when their memory is released; servers that failed to sleep have been ended."""
        if self.asleep:
            raise RolloutError(f"the engine cannot go to sleep from being {self.state}; wake all of it first")
        self.asleep = frozenset(ENGINE_PARTS)  # from now on no request is sent to a server
        self.may_start.clear()
        await self._until_idle(members, abort)
        ended = await self._growth.end_grown([(m, m.incarnation) for m in members if m.incarnation is not None])
        await self._until(lambda: all(m.incarnation is not incarnation for m, incarnation in ended))
        incarnations = None
        # servers that end meanwhile have to be gone, too
        while incarnations != (incarnations := [m.incarnation for m in members]):
            if self._listener is not None:
                await self._listener.hold()
            await self._tell([m for m in members if not m.endpoint.asleep], lambda endpoint: endpoint.sleep())
            await self._until(lambda: not any(m.draining for m in members))

    async def _until_idle(self, members: Sequence[ServerSlot], abort: bool) -> None:
        def busy() -> list[ServerSlot]:
            return [m for m in members if m.draining or m.endpoint.in_flight]

        while now := busy():
            if abort:  # a server that cannot be reached is ended by its health check
                up = [m.endpoint for m in now if m.up and m.endpoint.in_flight]
                await asyncio.gather(*(endpoint.interrupt() for endpoint in up), return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS if abort else None):
                    await self._until(lambda: not busy())

    async def wake(self, members: Sequence[ServerSlot], part: EnginePart) -> None:
        """Wake one part of all sleeping servers. Once all parts are awake, servers may be started again."""
        turn = next((p for p in ENGINE_PARTS if p in self.asleep), None)
        if part != turn:
            fix = "it is awake already" if turn is None else f"wake its {turn} first"
            raise RolloutError(f"the engine is {self.state} and its {part} cannot be woken: {fix}")
        await self._tell([m for m in members if part in m.endpoint.asleep], lambda endpoint: endpoint.wake(part))
        self.asleep -= {part}
        if not self.asleep:
            self.may_start.set()
            if self._listener is not None:
                self._listener.free()

    async def _tell(self, members: Sequence[ServerSlot], say: Callable[[Endpoint], Awaitable[None]]) -> None:
        """Make one call to all servers that are up, concurrently. A server on which the call fails is ended."""
        alive = [(m, m.incarnation) for m in members if m.incarnation is not None]
        results = await asyncio.gather(*(say(m.endpoint) for m, _ in alive), return_exceptions=True)
        for (member, incarnation), result in zip(alive, results, strict=True):
            if isinstance(result, RequestFailed):
                result = RolloutError(f"{member.endpoint.name} {result.what}")
            if isinstance(result, RolloutError):
                incarnation.end(result)
                await self._until(lambda m=member, over=incarnation: m.incarnation is not over)  # type: ignore[misc]
            elif isinstance(result, BaseException):
                raise result

    async def _until(self, condition: Callable[[], bool]) -> None:
        await until(self._changed, condition, self._seconds, "the servers do not come to rest")
