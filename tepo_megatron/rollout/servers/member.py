"""One server's place among several: kept alive, given up when that does not help."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import RolloutError, TepoError
from tepo_megatron.rollout.servers.client import RequestFailed
from tepo_megatron.rollout.servers.endpoint import Connected

LONGEST_PAUSE = 30.0  # seconds before a start
C = TypeVar("C", bound=Connected)
MOST_ERRORS = 3  # answers with an error, one after the other, after which a server is started again


class Planned(RolloutError):
    """Why a healthy server is ended: it is started again at once, and nothing is held against it."""


class Life:
    """From when a server is up to when it has to be ended, for a reason that whoever sees it tells."""

    def __init__(self) -> None:
        self._end: asyncio.Future[RolloutError | None] = asyncio.get_running_loop().create_future()

    def end(self, why: RolloutError | None) -> None:
        """The first one to see it says why; None: its health tells."""
        if not self._end.done():
            self._end.set_result(why)

    async def ended(self) -> RolloutError | None:
        """Why, once it has to be ended."""
        return await self._end


class Member(Generic[C]):
    """cfg: restarts and backoff_seconds of it count; tell: called when something changed that others wait for; event: told what
    the user should know; may_start: set while a server may be started, which takes its memory; None: it always may. All in one
    event loop.

    life: the server is healthy, None: it is not; lost: why it is not started any more; again: how often it was started again.
    """

    def __init__(
        self,
        endpoint: C,
        cfg: ServerConfig,
        tell: Callable[[], Awaitable[None]],
        event: Callable[[str], None],
        may_start: asyncio.Event | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.life: Life | None = None
        self.lost: TepoError | None = None
        self.again = 0
        self._ending = False  # it was up, and whether it is lost is not decided yet
        self._cfg, self._tell, self._event, self._may_start = cfg, tell, event, may_start
        self._restarts = self._errors = 0  # answers with an error; both since the last good one

    @property
    def up(self) -> bool:
        """Whether the server takes requests."""
        return self.life is not None

    @property
    def between(self) -> bool:
        """Whether a process that is no server any more, or not yet, holds memory, or may be a server that is lost."""
        return not self.up and (self._ending or self.endpoint.running)

    async def keep(self) -> None:
        """Keep the server, which was launched, alive until it is lost."""
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
                self.again += 1
                await self._tell()
                number = f" (restart {self._restarts}) after {pause:g} s" if pause is not None else ""
                self._event(f"{error}\n{endpoint.name} {endpoint.server.again}{number}")
                await asyncio.sleep(pause or 0.0)
                while self._may_start is not None and not self._may_start.is_set():
                    await self._may_start.wait()
                endpoint.launch()
        except TepoError as e:
            self.lost = e
        except Exception as e:  # without this a mistake here would leave everyone waiting
            self.lost = RolloutError(f"{endpoint.name}: {e!r}")
            raise
        finally:
            self._ending = False
            await self._tell()

    def _pause(self, error: RolloutError, once_up: bool) -> float | None:
        """Return the seconds until the next start, None for a planned one. Raises `error` where there is to be none."""
        if isinstance(error, Planned):
            return None
        self._restarts += 1
        # one that fails before it ever served has a wrong setting, which waiting would hide
        if not once_up or self._restarts > self._cfg.restarts:
            raise error
        return min(LONGEST_PAUSE, self._cfg.backoff_seconds * 2 ** (self._restarts - 1))

    def delivered(self) -> None:
        """It gave a good answer."""
        self._restarts = self._errors = 0

    async def failed(self, life: Life, cause: RequestFailed) -> RolloutError:
        """What a request that failed in `life` says: a server that answered with an error may live on, any other is ended."""
        if life is not self.life or self.endpoint.client is None:  # others saw it before: that life is over
            return RolloutError(f"{self.endpoint.name} {cause.what}")
        error = await self.endpoint.failure(cause.what)
        self._errors += 1
        if not cause.answered or self._errors >= MOST_ERRORS or not self.endpoint.running:
            life.end(error)
        return error

    async def _live(self) -> RolloutError:
        """While the server is up; returns why it no longer is."""
        assert self.endpoint.client is not None
        life = self.life = Life()
        watch = asyncio.create_task(self.endpoint.client.illness())
        watch.add_done_callback(lambda _: life.end(None))
        await self._tell()
        try:
            return await life.ended() or await self.endpoint.failure(watch.result())
        finally:
            self.life, self._ending = None, True
            watch.cancel()
            await self._tell()
