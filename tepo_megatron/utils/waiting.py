"""A time limit that does not count the time in which this process could not look."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

LATE_SECONDS = 1.0  # a timer that is later than this was held up by a stopped process or a blocked event loop


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Limit a block like `asyncio.timeout`, but let what came in time count when the event loop is late to look at it.

    Where the loop did not run when the limit passed, `asyncio.timeout` cancels the block before it sees what has arrived
    meanwhile. Here the block goes on for as long again as the loop was late.
    """
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def look(due: float) -> None:
        late = loop.time() - due
        if late > LATE_SECONDS:
            wait(late)
        else:
            limit.reschedule(loop.time())

    def wait(seconds: float) -> None:
        timers.append(loop.call_later(seconds, look, loop.time() + seconds))

    async with asyncio.timeout(None) as limit:
        wait(seconds)
        try:
            yield limit
        finally:
            timers[-1].cancel()
