"""Supervision of one server of a fleet: restart it when it fails, and give it up when restarts do not help."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tepo_megatron.base.errors import RolloutError, TepoError
from tepo_megatron.config import AnyServerConfig
from tepo_megatron.engines.servers.client import RequestFailed
from tepo_megatron.engines.servers.endpoint import ServerConnection

BACKOFF_SECONDS = 1.0  # pause before the first restart, doubled for each consecutive one
LONGEST_PAUSE = 30.0  # seconds; upper limit of the back-off before a restart
C = TypeVar("C", bound=ServerConnection)
MOST_ERRORS = 3  # consecutive error answers after which a server is restarted


class PlannedRestart(RolloutError):
    """Reason for ending a healthy server. The server is restarted at once, and the restart does not count as a failure."""


class Incarnation:
    """One incarnation of a server, from healthy to ended. Whoever finds a reason to end it calls `end`."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self._end: asyncio.Future[RolloutError | None] = asyncio.get_running_loop().create_future()

    def end(self, why: RolloutError | None) -> None:
        """Request the end of this incarnation. Only the first call has an effect."""
        if not self._end.done():
            self._end.set_result(why)

    @property
    def ending(self) -> bool:
        """Return whether its end was requested."""
        return self._end.done()

    async def ended(self) -> RolloutError | None:
        """Wait until `end` is called, and return the reason that was given."""
        return await self._end


class ServerSlot(Generic[C]):
    """Slot of one server in the fleet: watches the server, restarts it with exponential back-off, and declares it lost."""

    def __init__(
        self,
        endpoint: C,
        cfg: AnyServerConfig,
        tell: Callable[[], Awaitable[None]],
        event: Callable[[str], None],
        may_start: asyncio.Event | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.incarnation: Incarnation | None = None
        self.lost: TepoError | None = None
        self.restart_count = 0
        self._ending = False  # it was up, and it is not decided yet whether it is lost
        self._cfg, self._tell, self._event, self._may_start = cfg, tell, event, may_start
        self._restarts = self._errors = 0  # failures and error answers since the last good answer

    @property
    def up(self) -> bool:
        """Return whether the server takes requests."""
        return self.incarnation is not None

    @property
    def draining(self) -> bool:
        """Return whether the slot is in transition: not up, but its process may hold memory, or its loss is undecided."""
        return not self.up and (self._ending or self.endpoint.server.running)

    async def supervise(self) -> None:
        """Supervise the server, which was launched already, until it is lost or this task is cancelled."""
        endpoint, once_up = self.endpoint, False
        try:
            while True:
                try:
                    await endpoint.ready()
                    once_up = True
                    error = await self._live()
                except RolloutError as e:
                    error = e
                await endpoint.close()
                pause = self._pause(error, once_up)
                self._ending = False
                self.restart_count += 1
                await self._tell()
                number = f" (restart {self._restarts}) after {pause:g} s" if pause is not None else ""
                self._event(f"{error}\n{endpoint.name} {endpoint.server.restart_note}{number}")
                await asyncio.sleep(pause or 0.0)
                while self._may_start is not None and not self._may_start.is_set():
                    await self._may_start.wait()
                endpoint.launch()
        except TepoError as e:
            self.lost = e
        except Exception as e:  # a bug here must not leave everyone waiting
            self.lost = RolloutError(f"{endpoint.name}: {e!r}")
            raise
        finally:
            self._ending = False
            await self.endpoint.disconnect()
            await self._tell()

    def _pause(self, error: RolloutError, once_up: bool) -> float | None:
        """Return the seconds until the next start, None for a planned restart. Raise `error` if the server is lost."""
        if isinstance(error, PlannedRestart):
            return None
        self._restarts += 1
        # A server that fails before it ever served has a wrong setting, which retries would only hide.
        if not once_up or self._restarts > self._cfg.restarts:
            raise error
        return min(LONGEST_PAUSE, BACKOFF_SECONDS * 2 ** (self._restarts - 1))

    def delivered(self) -> None:
        """Reset the failure counters after a good answer."""
        self._restarts = self._errors = 0

    async def failed(self, incarnation: Incarnation, cause: RequestFailed) -> RolloutError:
        """Return the error of a failed request, and end the incarnation if the server cannot be trusted to go on.

        The incarnation goes on if the server answered with an error, has done so fewer than `MOST_ERRORS` times since its last
        good answer, and its process is running.
        """
        # another request failed before: this incarnation is over
        if incarnation is not self.incarnation or self.endpoint.client is None:
            return RolloutError(f"{self.endpoint.name} {cause.what}")
        error = await self.endpoint.server.failure(cause.what)
        self._errors += 1
        if not cause.answered or self._errors >= MOST_ERRORS or not self.endpoint.server.running:
            incarnation.end(error)
        return error

    async def _live(self) -> RolloutError:
        """Publish a new incarnation, wait until it has to end, and return the reason."""
        assert self.endpoint.client is not None
        incarnation = self.incarnation = Incarnation()
        watch = asyncio.create_task(self.endpoint.client.wait_unhealthy())
        watch.add_done_callback(lambda _: incarnation.end(None))
        await self._tell()
        try:
            return await incarnation.ended() or await self.endpoint.server.failure(watch.result())
        finally:
            self.incarnation, self._ending = None, True
            watch.cancel()
            await self._tell()
