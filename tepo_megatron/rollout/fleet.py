"""Several inference servers as one RolloutEngine: least-loaded routing, retries elsewhere, restarts, one version for all.

A server serves only while it is healthy and has the fleet's version of the weights. One that fails is ended and started again,
and takes part again once it has been given the weights anew, for which `needs_weights` asks. A prompt's group is one request to
one server (its samples share the prefix cache) and is delivered once: only the answer that arrives in full counts.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tepo_megatron.config import RolloutConfig
from tepo_megatron.errors import RolloutError, SyncError, TepoError
from tepo_megatron.rollout.client import RequestFailed
from tepo_megatron.rollout.endpoint import Endpoint
from tepo_megatron.rollout.engine import INITIAL_VERSION, StaleWeights
from tepo_megatron.rollout.loop import LoopThread
from tepo_megatron.types import Prompt, Rollout, SamplingParams

LONGEST_PAUSE = 30.0  # seconds before a start
RETRY_SECONDS = 0.2  # before a request is sent again, doubled each time
MOST_ERRORS = 3  # answers with an error, one after the other, after which a server is started again


@dataclasses.dataclass(eq=False)
class _Member:
    """A server's place in the fleet.

    up: it is healthy; failed: why it has to be ended, from whoever sees it; restarts, errors (answers with one): since its last
    good answer; lost: why it is not started any more.
    """

    endpoint: Endpoint
    up: bool = False
    failed: asyncio.Future[RolloutError | None] | None = None
    restarts: int = 0
    errors: int = 0
    lost: TepoError | None = None


class Fleet:
    """See `engine.RolloutEngine`. endpoints: not yet started.

    cfg: attempts, min_servers, server.concurrency, server.restarts and server.backoff_seconds of it count.
    """

    def __init__(self, endpoints: Sequence[Endpoint], cfg: RolloutConfig) -> None:
        self._cfg = cfg
        self._members = [_Member(endpoint) for endpoint in endpoints]
        self._version = INITIAL_VERSION
        self._loop = LoopThread("fleet")
        self._changed = asyncio.Condition()
        self._keepers: list[asyncio.Task[None]] = []
        self._events: list[str] = []
        # the servers that take part in the update under way, each with the `failed` of the life in which it began
        self._updating: list[tuple[_Member, asyncio.Future[RolloutError | None] | None]] = []
        self._refused = ""  # why the weights were refused: what is served is not known then

    @property
    def version(self) -> int:
        """Of the weights last given to the fleet; INITIAL_VERSION before."""
        return self._version

    @property
    def needs_weights(self) -> bool:
        """Whether a server that takes requests waits for the weights of `version`."""
        return any(m.up and m.endpoint.version != self._version for m in self._members)

    def take_events(self) -> list[str]:
        """What happened to servers since the last call, a line each."""
        events, self._events = self._events, []
        return events

    def start(self) -> None:
        """Start all servers; returns at once. Raises RolloutError (busy port, unwritable log), ConfigError (not installed)."""
        if self._keepers:
            raise RolloutError("the inference servers were already started; close the fleet first")
        self._version, self._refused, self._changed = INITIAL_VERSION, "", asyncio.Condition()
        for member in self._members:
            member.endpoint.launch()
        self._loop.run(self._keep_all())

    def wait_ready(self) -> None:
        """Return when every server takes requests, or was lost. Raises RolloutError with fewer than `min_servers`."""
        self._require_start()
        self._loop.run(self._until_settled())

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `RolloutEngine.generate`: one request per prompt, `rollout.server.concurrency` of them at once on each server.

        A failed request is sent again, to another server if there is one, up to `rollout.attempts` times; one that a server
        refuses (4xx) fails the call at once. Raises RolloutError, with fewer servers than `min_servers` too.
        """
        self._require_start()
        self._require_trust()
        return self._loop.run(self._generate(prompts, sampling, seed))

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `RolloutEngine.sample`: one request, routed and repeated like those of `generate`. Raises as that does."""
        self._require_start()
        self._require_trust()
        return await asyncio.wrap_future(self._loop.submit(self._group(prompt, sampling, seed)))

    def begin_update(self, version: int) -> None:
        """See `RolloutEngine.begin_update`: servers that have `version` already are left in peace, those that die of it are
        started again, and ask for the weights when it is over. Raises SyncError when one refuses them; the engine can then
        only be closed. After an update that was not finished, the servers that took part in it are started again.
        """
        self._require_start()
        self._require_trust()
        self._loop.run(self._begin(version))

    def load(self, files: Sequence[Path]) -> Future[None]:
        """See `RolloutEngine.load`."""
        return self._loop.submit(self._each(lambda endpoint: endpoint.load(files)))

    def finish_update(self) -> None:
        """See `RolloutEngine.finish_update`."""
        self._require_trust()
        self._loop.run(self._finish())

    def update_weights(self, files: Sequence[Path], version: int) -> None:
        """An update whose files all exist: begun, loaded and finished."""
        self.begin_update(version)
        self.load(files).result()
        self.finish_update()

    def close(self) -> None:
        """End all servers, bounded in time. May be called again, and before `start`."""
        self._loop.stop()
        with ThreadPoolExecutor(len(self._members)) as threads:  # each takes some seconds
            list(threads.map(lambda member: member.endpoint.stop(), self._members))
        for member in self._members:
            member.endpoint.forget()
        self._members = [_Member(member.endpoint) for member in self._members]
        self._keepers, self._updating = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _require_start(self) -> None:
        if not self._keepers:
            raise RolloutError("the inference server is not running; call start() and wait_ready() first")

    def _require_trust(self) -> None:
        if self._refused:
            raise SyncError(f"{self._refused}; the engine can no longer be used: close it and start a new one")

    # what goes on in the loop

    async def _keep_all(self) -> None:
        self._keepers = [asyncio.create_task(self._keep(member)) for member in self._members]

    async def _keep(self, member: _Member) -> None:
        """Keep one server alive until it is lost."""
        endpoint, once_up = member.endpoint, False
        try:
            while True:
                try:
                    await endpoint.ready()
                    once_up = True
                    error = await self._serve(member)
                except RolloutError as e:
                    error = e
                await endpoint.close()
                member.restarts += 1
                if not once_up or member.restarts > self._cfg.server.restarts:
                    raise error
                pause = min(LONGEST_PAUSE, self._cfg.server.backoff_seconds * 2 ** (member.restarts - 1))
                self._events.append(f"{error}\n{endpoint.name} is started again (restart {member.restarts}) after {pause:g} s")
                await asyncio.sleep(pause)
                endpoint.launch()
        except TepoError as e:
            member.lost = e
        except Exception as e:  # without this a mistake here would leave everyone waiting
            member.lost = RolloutError(f"{endpoint.name}: {e!r}")
            raise
        finally:
            await self._tell()

    async def _serve(self, member: _Member) -> RolloutError:
        """While the server is up; returns why it no longer is."""
        assert member.endpoint.client is not None
        failed = member.failed = asyncio.get_running_loop().create_future()
        watch = asyncio.create_task(member.endpoint.client.illness())
        watch.add_done_callback(lambda _: _settle(failed, None))
        member.up = True
        await self._tell()
        try:
            return await failed or await member.endpoint.failure(watch.result())
        finally:
            member.up = False
            watch.cancel()
            await self._tell()

    async def _until_settled(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: all(m.up or m.lost for m in self._members))
        self._check_enough()

    async def _generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(self._group(prompt, sampling, seed)) for prompt in prompts]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [rollout for group in groups for rollout in group.result()]

    async def _group(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """One prompt's samples, from whichever server delivers them."""
        avoid: Endpoint | None = None
        for attempt in range(1, self._cfg.attempts + 1):
            member = await self._free(avoid)
            life = member.failed
            with _occupied(member.endpoint):
                try:
                    rollouts = await member.endpoint.generate(prompt, sampling, seed)
                    member.restarts = member.errors = 0
                    return rollouts
                except RequestFailed as e:
                    if e.refused:
                        raise RolloutError(f"{member.endpoint.name} {e.what}") from None
                    if member.failed is life and member.endpoint.client is not None:
                        error = await self._failed(member, e)
                    else:  # others saw it fail before, and that life of the server is over
                        error = RolloutError(f"{member.endpoint.name} {e.what}")
                except StaleWeights as e:
                    error = e
                    _settle(life, e)
                except RolloutError as e:
                    error = e
                finally:
                    await self._tell()
            avoid = member.endpoint
            if attempt < self._cfg.attempts:
                self._events.append(f"prompt {prompt.id} is sampled again: {str(error).splitlines()[0]}")
                await asyncio.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
        raise error

    async def _free(self, avoid: Endpoint | None) -> _Member:
        """The least loaded server with room for a request, rather not `avoid`; waits for one. Raises RolloutError."""
        while True:
            async with self._changed:
                self._check_enough()
                serving = [m for m in self._members if m.up and m.endpoint.version == self._version]
                free = [m for m in serving if m.endpoint.in_flight < self._cfg.server.concurrency]
                if free:
                    return min(free, key=lambda m: (m.endpoint is avoid, m.endpoint.in_flight))
                await self._changed.wait()

    async def _failed(self, member: _Member, cause: RequestFailed) -> RolloutError:
        """What a failed request says of the server: one that answered with an error may live on, any other is ended."""
        life = member.failed
        error = await member.endpoint.failure(cause.what)
        member.errors += 1
        if not cause.answered or member.errors >= MOST_ERRORS or not member.endpoint.running:
            _settle(life, error)
        return error

    async def _begin(self, version: int) -> None:
        self._version = version
        broken_off = [member for member, life in self._updating if member.failed is life]
        for member in broken_off:
            _settle(member.failed, RolloutError(f"{member.endpoint.name} was given weights half-way"))
        behind = [m for m in self._members if m.up and m.endpoint.version != version and m not in broken_off]
        self._updating = [(m, m.failed) for m in behind]
        async with self._changed:  # what they sample with the weights they have may end; they are given nothing more
            await self._changed.wait_for(lambda: not any(m.up and m.endpoint.in_flight for m in behind))
        await self._each(lambda endpoint: endpoint.begin_update(version))

    async def _each(self, say: Callable[[Endpoint], Awaitable[None]]) -> None:
        """A part of an update, to every server that has lived since it began. Raises SyncError when one refuses it."""
        alive = [(m, life) for m, life in self._updating if m.up and m.failed is life]
        results = await asyncio.gather(*(say(m.endpoint) for m, _ in alive), return_exceptions=True)
        for (member, life), result in zip(alive, results, strict=True):
            if isinstance(result, RequestFailed):
                if member.up and member.failed is life:
                    await self._failed(member, result)
            elif isinstance(result, BaseException) and not isinstance(result, SyncError):
                raise result
        self._updating = [each for each, result in zip(alive, results, strict=True) if result is None]
        refused = [result for result in results if isinstance(result, SyncError)]
        if refused:
            self._refused = f"the update to version {self._version} failed"
            raise refused[0]

    async def _finish(self) -> None:
        await self._each(lambda endpoint: endpoint.finish_update())
        self._updating = []
        await self._tell()

    def _check_enough(self) -> None:
        """Raise RolloutError when too many servers were lost."""
        lost = [m.lost for m in self._members if m.lost is not None]
        left = len(self._members) - len(lost)
        if left < self._cfg.min_servers:
            if len(self._members) == 1:
                raise RolloutError(str(lost[0]))
            reasons = "\n".join(str(error) for error in lost)
            raise RolloutError(
                f"{left} of {len(self._members)} inference servers are left, fewer than rollout.min_servers="
                f"{self._cfg.min_servers}:\n{reasons}"
            )

    async def _tell(self) -> None:
        """Something changed that others wait for."""
        async with self._changed:
            self._changed.notify_all()


@contextmanager
def _occupied(endpoint: Endpoint) -> Iterator[None]:
    endpoint.in_flight += 1
    try:
        yield
    finally:
        endpoint.in_flight -= 1


def _settle(failed: asyncio.Future[RolloutError | None] | None, error: RolloutError | None) -> None:
    """Say that a server has to be ended, if nobody has yet; None: its health tells why."""
    if failed is not None and not failed.done():
        failed.set_result(error)
