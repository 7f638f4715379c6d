"""The servers of a fleet as one pool: start and end them, keep them running, and know which of them serve its weights.

Everything that concerns servers runs in the event loop of the pool. `fleet.py` (sampling), `updates.py` (weights) and
`fleet.py` (the rest of an engine) share one pool.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from tepo_megatron.base.errors import RolloutError, SyncError
from tepo_megatron.base.loop import LoopThread
from tepo_megatron.base.processes import SPARE_FILES, raise_open_file_limit
from tepo_megatron.config import RolloutConfig
from tepo_megatron.engines.engine import INITIAL_VERSION, UNKNOWN_VERSION
from tepo_megatron.engines.servers.client import CONTROL_CONNECTIONS
from tepo_megatron.engines.servers.endpoint import Endpoint
from tepo_megatron.engines.servers.listener import RunListener
from tepo_megatron.engines.servers.sleep import GrowthLimit, SleepController, until
from tepo_megatron.engines.servers.slot import Incarnation, ServerSlot


class ServerPool:
    """The servers, each in a slot that restarts it, and the state that they have in common.

    Attributes:
        refused: Why the weights were refused; the served version is unknown then. Empty: they were not.
    """

    def __init__(self, endpoints: Sequence[Endpoint], cfg: RolloutConfig, listener: RunListener | None = None) -> None:
        self._cfg, self.endpoints, self._listener = cfg, endpoints, listener
        self.slots: list[ServerSlot[Endpoint]] = []
        self.version, self.refused = INITIAL_VERSION, ""
        self.loop, self.changed = LoopThread("fleet"), asyncio.Condition()
        self.growth = GrowthLimit(cfg.server.growth_limit_gib)
        self.sleeping = SleepController(self.changed, listener, self.growth, cfg.server.change_seconds)
        self._supervisors: list[asyncio.Task[None]] = []
        self._events: list[str] = []
        # Requests that wait for a server, oldest first, each with the server that it avoids
        self.waiting: OrderedDict[asyncio.Future[tuple[ServerSlot[Endpoint], Incarnation]], Endpoint | None] = OrderedDict()
        self._in_flight = self._most_in_flight = 0
        self._update_begun: float | None = None  # of `version`; seconds of the monotonic clock
        self._out_of_patience: asyncio.TimerHandle | None = None  # runs while requests wait for weights that no server has

    def start(self) -> None:
        if self._supervisors:
            raise RolloutError("the inference servers were already started; close the fleet first")
        self.version, self.refused, self.changed = INITIAL_VERSION, "", asyncio.Condition()
        self.waiting.clear()
        self._update_begun = self._out_of_patience = None
        self._in_flight, self._most_in_flight = 0, self._allowed_in_flight()
        self.sleeping = SleepController(self.changed, self._listener, self.growth, self._cfg.server.change_seconds)
        if self._listener is not None:
            self.loop.run(self._listener.open())
        may_start = self.sleeping.may_start
        self.slots = [ServerSlot(e, self._cfg.server, self.notify, self.event, may_start) for e in self.endpoints]
        for endpoint in self.endpoints:
            endpoint.launch()
        self.loop.run(self._keep_all())

    def wait_ready(self) -> None:
        self.require_start()
        self.loop.run(self._until_settled())

    def close(self) -> None:
        if self._listener is not None:
            self.loop.run(self._listener.close())
        self.loop.stop()
        with ThreadPoolExecutor(len(self.endpoints)) as threads:  # each stop takes some seconds
            list(threads.map(lambda endpoint: endpoint.server.stop(), self.endpoints))
        for endpoint in self.endpoints:
            endpoint.server.forget()
        self._supervisors = []

    def require_start(self) -> None:
        """Raise RolloutError unless the servers were started."""
        if not self._supervisors:
            raise RolloutError("the inference server is not running; call start() and wait_ready() first")

    def require_trust(self) -> None:
        """Raise SyncError if an update or its check was refused: nobody knows then what the servers serve."""
        if self.refused:
            raise SyncError(f"{self.refused}; the engine can no longer be used: close it and start a new one")

    def require_enough(self) -> None:
        """Raise RolloutError if fewer than `min_servers` servers are left."""
        lost = [slot.lost for slot in self.slots if slot.lost is not None]
        servers, left, wanted = len(self.slots), len(self.slots) - len(lost), self._cfg.min_servers
        if left >= wanted:
            return
        if servers == 1:
            raise RolloutError(str(lost[0]))
        reasons = "\n".join(str(error) for error in lost)
        raise RolloutError(
            f"{left} of {servers} inference servers are left, fewer than rollout.min_servers={wanted}:\n{reasons}"
        )

    def _refuse_other_weights(self) -> None:
        """Raise RolloutError if a server needs weights that nobody will send (`rollout.only`)."""
        for member in self.slots:
            if member.up and member.endpoint.version == UNKNOWN_VERSION:
                raise RolloutError(
                    f"rollout.only=true samples with the weights of model.path, and {member.endpoint.name} serves others, "
                    "which another run sent; start it again"
                )

    def up(self) -> list[tuple[ServerSlot[Endpoint], Incarnation]]:
        """Return the servers that take requests, with their incarnations, whatever weights they serve."""
        return [(slot, slot.incarnation) for slot in self.slots if slot.incarnation is not None]

    def serving(self) -> list[tuple[ServerSlot[Endpoint], Incarnation]]:
        """Return the servers that take requests and serve `version`, with their incarnations."""
        return [(slot, incarnation) for slot, incarnation in self.up() if slot.endpoint.version == self.version]

    def event(self, text: str) -> None:
        """Add a message for the user."""
        self._events.append(text)

    def take_events(self) -> list[str]:
        events, self._events = self._events, []
        return events

    async def notify(self) -> None:
        """Wake all tasks that wait for a change of a server's state, and the requests that a server is free for."""
        self._assign()
        async with self.changed:
            self.changed.notify_all()

    async def acquire(self, avoid: Endpoint | None) -> tuple[ServerSlot[Endpoint], Incarnation]:
        """Return the least loaded server that may take another request, and count the request. Call `release` after it.

        The oldest waiting request gets the first free server, and wakes only then. Raises RolloutError if fewer than
        `min_servers` servers are left, or a server needs weights that nobody sends.
        """
        place = asyncio.get_running_loop().create_future()
        self.waiting[place] = avoid
        try:
            self._assign()
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                await self.release(place.result()[0])
            raise
        finally:
            self.waiting.pop(place, None)

    def occupy(self, slot: ServerSlot[Endpoint]) -> None:
        """Count a request that needs no place in the queue as begun, so that no update comes in between. `release` ends it."""
        slot.endpoint.in_flight += 1
        slot.endpoint.most_in_flight = max(slot.endpoint.most_in_flight, slot.endpoint.in_flight)
        self._in_flight += 1

    async def release(self, slot: ServerSlot[Endpoint]) -> None:
        """Count a request of `acquire` or `occupy` as ended."""
        slot.endpoint.in_flight -= 1
        self._in_flight -= 1
        if slot.endpoint.in_flight:
            self._assign()
        else:
            await self.notify()

    def begin_version(self, version: int) -> None:
        """Have the servers serve `version`, whose update begins: requests are patient again."""
        self.version, self._update_begun = version, time.monotonic()
        self._stop_patience()
        self._limit_patience()

    def _assign(self) -> None:
        self._give_servers()
        self._limit_patience()

    def _limit_patience(self) -> None:
        if not self.waiting or self.sleeping.asleep or self.serving() or not self.up():
            self._stop_patience()
        elif self._out_of_patience is None:
            wait = self._cfg.server.weights_seconds
            self._out_of_patience = asyncio.get_running_loop().call_later(wait, self._lose_patience)

    def _give_servers(self) -> None:
        while self.waiting:
            try:
                self.require_enough()
                # requests of a sleeping engine are those that their caller has abandoned
                serving = [] if self.sleeping.asleep else self.serving()
                if self._cfg.only and not serving:
                    self._refuse_other_weights()
            except RolloutError as e:
                self._fail_waiting(e)
                return
            free = [each for each in serving if each[0].endpoint.in_flight < self._cfg.server.concurrency]
            if not free or self._in_flight >= self._most_in_flight:
                return
            place, avoid = self.waiting.popitem(last=False)
            if not place.done():
                others = free if avoid is None else [each for each in free if each[0].endpoint is not avoid]
                slot, incarnation = min(others or free, key=_in_flight)
                self.occupy(slot)
                place.set_result((slot, incarnation))

    def _fail_waiting(self, error: RolloutError) -> None:
        for place in self.waiting:
            if not place.done():
                place.set_exception(error)
        self.waiting.clear()

    def _stop_patience(self) -> None:
        if self._out_of_patience is not None:
            self._out_of_patience.cancel()
        self._out_of_patience = None

    def _lose_patience(self) -> None:
        self._out_of_patience = None
        begun = self._update_begun
        last = "no update has begun" if begun is None else f"its update began {time.monotonic() - begun:.0f} s ago"
        servers = "; ".join(f"{slot.endpoint.name} {_weights_of(slot)}" for slot in self.slots)
        self._fail_waiting(
            RolloutError(
                f"{len(self.waiting)} requests have waited {self._cfg.server.weights_seconds:g} s for the weights of version "
                f"{self.version}, and {last}: {servers}. Nobody sends them; raise rollout.server.weights_seconds if a step "
                "takes longer"
            )
        )

    def _allowed_in_flight(self) -> int:
        """Raise the limit of open files, and return the number of requests for whose connections it is enough."""
        most, servers = len(self.endpoints) * self._cfg.server.concurrency, len(self.endpoints)
        limit, others = raise_open_file_limit(), psutil.Process().num_fds() + servers * CONTROL_CONNECTIONS + SPARE_FILES
        if limit >= others + most:
            return most
        allowed = max(1, (limit - others) * 3 // 4)  # the rest is for idle connections
        self.event(
            f"only {allowed} of {most} requests run concurrently, because a process may open {limit} files here and these "
            f"need {others + most}; raise the limit (`ulimit -n {others + most}`), or lower rollout.server.concurrency"
        )
        return allowed

    async def _keep_all(self) -> None:
        self._supervisors = [asyncio.create_task(slot.supervise()) for slot in self.slots]

    async def _until_settled(self) -> None:
        seconds, what = self._cfg.server.change_seconds, "the servers neither serve nor are lost"
        await until(self.changed, lambda: all(slot.up or slot.lost for slot in self.slots), seconds, what)
        self.require_enough()


def _weights_of(slot: ServerSlot[Endpoint]) -> str:
    if slot.lost is not None:
        return "is lost"
    if not slot.up:
        return "is not up"
    versions = {INITIAL_VERSION: "its first weights", UNKNOWN_VERSION: "weights of no known version"}
    return f"serves {versions.get(slot.endpoint.version, f'version {slot.endpoint.version}')}"


def _in_flight(each: tuple[ServerSlot[Endpoint], Incarnation]) -> int:
    return each[0].endpoint.in_flight
