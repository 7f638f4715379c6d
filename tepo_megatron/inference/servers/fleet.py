"""Several inference servers as one RolloutEngine: least-loaded routing, retries on other servers, restarts, one weight version.

A server is used only while it is healthy and serves the fleet's version of the weights. A failed server is ended and restarted.
It is used again once it has received the weights again, which `needs_weights` asks the trainer for. A prompt's group is one
request to one server (its samples share the prefix cache). Each group is delivered once: only a complete answer counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tepo_megatron.config import RolloutConfig
from tepo_megatron.errors import RolloutError, SyncError
from tepo_megatron.inference.engine import INITIAL_VERSION, UNKNOWN_VERSION, Deliver, EnginePart, GroupStream
from tepo_megatron.inference.engine_api import StaleWeights
from tepo_megatron.inference.loop import Arrivals, LoopThread
from tepo_megatron.inference.partial import GenerationRequest, continuations, merge
from tepo_megatron.inference.servers.checksums import Checks
from tepo_megatron.inference.servers.client import RequestFailed
from tepo_megatron.inference.servers.endpoint import Endpoint
from tepo_megatron.inference.servers.growth import GrowthLimit
from tepo_megatron.inference.servers.quiesce import Quiesce
from tepo_megatron.inference.servers.sleep import SleepController
from tepo_megatron.inference.servers.slot import Incarnation, ServerSlot
from tepo_megatron.inference.servers.status import ServerStatus, refuse_other_weights, require_enough, status_of
from tepo_megatron.types import Prompt, Rollout, SamplingParams
from tepo_megatron.weight_sync.broadcast_group import GroupSpec, Recipient, Source

RETRY_SECONDS = 0.2  # before a request is sent again, doubled each time
INTERRUPT_SECONDS = 0.5  # between abort calls: repeated for requests that were still on their way to the server


class Fleet:
    """Implementation of `engine.RolloutEngine` on several servers.

    Args:
        endpoints: The servers, not yet launched.
        cfg: Only attempts, in_flight, min_servers, only, server.concurrency, server.precision, server.restarts,
            server.backoff_seconds and server.restart_after_growth_gib are used.
        standstill: Quiesces servers that others start, where they have to sleep (`rollout.colocate`). None: not needed.

    Attributes:
        endpoints: The servers, in the order in which they were given. Only the fleet may call methods that change them.
    """

    def __init__(self, endpoints: Sequence[Endpoint], cfg: RolloutConfig, standstill: Quiesce | None = None) -> None:
        self._cfg, self.endpoints, self._standstill = cfg, endpoints, standstill
        self._members: list[ServerSlot[Endpoint]] = []
        self._version = INITIAL_VERSION
        self._loop = LoopThread("fleet")
        self._changed = asyncio.Condition()
        self._growth = GrowthLimit(cfg.server.restart_after_growth_gib)
        self._rest = SleepController(self._changed, standstill, self._growth)
        self._keepers: list[asyncio.Task[None]] = []
        self._events: list[str] = []
        # servers of the update under way, with their incarnation when it began
        self._updating: list[tuple[ServerSlot[Endpoint], Incarnation]] = []
        self._bases: set[int] = set()  # versions that these servers had before the update
        self._refused = ""  # why the weights were refused; the served version is unknown then
        self._checks = Checks(same_precision=cfg.server.precision is None)

    @property
    def version(self) -> int:
        """Version of the weights of the last `begin_update`; INITIAL_VERSION before the first."""
        return self._version

    @property
    def needs_weights(self) -> bool:
        """Return whether a healthy server waits for the weights of `version`."""
        return any(m.up and m.endpoint.version != self._version for m in self._members)

    def status(self) -> tuple[ServerStatus, ...]:
        """Return the state of all servers now, in the order of `endpoints`; empty before `start`."""
        return tuple(status_of(member) for member in self._members)

    def take_events(self) -> list[str]:
        """Return what happened to servers since the last call, one message each, and forget it."""
        events, self._events = self._events, []
        return events

    def start(self) -> None:
        """Launch all servers and return at once.

        Raises RolloutError (busy port, unwritable log), ConfigError (not installed).
        """
        if self._keepers:
            raise RolloutError("the inference servers were already started; close the fleet first")
        self._version, self._refused, self._changed = INITIAL_VERSION, "", asyncio.Condition()
        self._checks = Checks(same_precision=self._cfg.server.precision is None)
        self._rest = SleepController(self._changed, self._standstill, self._growth)
        self._rest.rise()  # a killed run may have left its device lease
        self._members = [ServerSlot(e, self._cfg.server, self._tell, self._event, self._rest.may_start) for e in self.endpoints]
        for endpoint in self.endpoints:
            endpoint.launch()
        self._loop.run(self._keep_all())

    def wait_ready(self) -> None:
        """Return when every server takes requests or is lost. Raises RolloutError if fewer than `min_servers` are left."""
        self._require_start()
        self._loop.run(self._until_settled())

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `RolloutEngine.generate`: one request per prompt, at most `rollout.server.concurrency` at once on each server.

        A failed request is sent again, to another server if there is one, up to `rollout.attempts` times. A request that a
        server rejects (4xx) fails the call at once.

        Args:
            prompts, sampling, seed: See `RolloutEngine.generate`.

        Raises:
            RolloutError: A request failed for good, or fewer than `min_servers` servers are left.
            SyncError: The last update or its check was refused.
        """
        self._require_service()
        return self._loop.run(self._generate(prompts, sampling, seed))

    def open(self) -> GroupStream:
        """See `RolloutEngine.open`. Requests are routed and retried as in `generate`."""
        self._require_service()
        return Arrivals(self._loop, self._generate)

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `RolloutEngine.sample`: one request, routed and retried like those of `generate`, with the same errors.

        Args:
            prompt, sampling, seed: See `RolloutEngine.sample`.
        """
        self._require_service()
        return await asyncio.wrap_future(self._loop.submit(self._group(prompt, sampling, seed)))

    def begin_update(self, version: int) -> None:
        """See `RolloutEngine.begin_update`. Servers that have `version` already take no part in the update.

        A server that dies during the update is restarted and needs the weights afterwards. Servers of an earlier update that
        was not finished are restarted.

        Raises:
            SyncError: A server refused the update. The engine can then only be closed.
            RolloutError: The engine is not started, the memory of the weights is released, or too few servers are left.
        """
        self._require_start()
        self._require_trust()
        self._rest.require_weights()
        self._loop.run(self._begin(version))

    @property
    def base(self) -> int | None:
        """See `RolloutEngine.base`."""
        return next(iter(self._bases)) if len(self._bases) == 1 else None

    def keep(self, names: Sequence[str]) -> None:
        """See `RolloutEngine.keep`. Without a `base` no tensor can stay unchanged, so `names` has to be empty."""
        base = UNKNOWN_VERSION if self.base is None else self.base
        self._loop.run(self._each(lambda endpoint: endpoint.keep(base, names)))

    @property
    def takers(self) -> tuple[Recipient, ...]:
        """See `RolloutEngine.takers`."""
        taking = [(m.endpoint, life) for m, life in self._updating if m.life is life]
        return tuple(Recipient(e.name, e.host, e.ranks, life) for e, life in taking)

    def join(self, meetings: Mapping[Recipient, GroupSpec]) -> Future[None]:
        """See `RolloutEngine.join`."""
        of = {taker.life: meeting for taker, meeting in meetings.items()}
        places = {m.endpoint: of[life] for m, life in self._updating if life in of}
        return self._loop.submit(self._each(lambda endpoint: endpoint.join(places[endpoint])))

    def load(self, sources: Sequence[Source]) -> Future[None]:
        """See `RolloutEngine.load`."""
        return self._loop.submit(self._each(lambda endpoint: endpoint.load(sources)))

    def finish_update(self) -> None:
        """See `RolloutEngine.finish_update`."""
        self._require_trust()
        self._loop.run(self._finish())

    def verify(self, sent: Mapping[str, int]) -> None:
        """See `RolloutEngine.verify`."""
        self._require_trust()
        self._loop.run(self._verify(sent))

    def update_weights(self, files: Sequence[Path], version: int) -> None:
        """Run a whole update from files that all exist: begin, load, finish.

        Args:
            files: safetensors files that hold all tensors of the model.
            version: Version of these weights.
        """
        self.begin_update(version)
        self.load(files).result()
        self.finish_update()

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`. A server that fails to sleep is ended. No server is started while the fleet sleeps."""
        self._require_start()
        self._loop.run(self._rest.sleep(self._members))
        require_enough(self._members, self._cfg.min_servers)

    def wake(self, part: EnginePart) -> None:
        """See `RolloutEngine.wake`. A server that fails to wake is ended, and restarted once all parts are awake."""
        self._require_start()
        self._loop.run(self._rest.wake(self._members, part))
        require_enough(self._members, self._cfg.min_servers)

    def resident_bytes(self) -> int:
        """See `RolloutEngine.resident_bytes`."""
        return sum(endpoint.resident_bytes for endpoint in self.endpoints)

    @property
    def restarts(self) -> int:
        """See `RolloutEngine.restarts`."""
        return sum(member.again for member in self._members)

    def close(self) -> None:
        """End all servers; bounded in time. May be called again, and before `start`."""
        self._loop.stop()
        with ThreadPoolExecutor(len(self.endpoints)) as threads:  # each stop takes some seconds
            list(threads.map(lambda endpoint: endpoint.stop(), self.endpoints))
        for endpoint in self.endpoints:
            endpoint.forget()
        self._rest.rise()
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

    def _require_service(self) -> None:
        self._require_start()
        self._require_trust()
        self._rest.require_awake("sampling")

    # The rest runs in the event loop.

    async def _keep_all(self) -> None:
        self._keepers = [asyncio.create_task(member.keep()) for member in self._members]

    async def _until_settled(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: all(m.up or m.lost for m in self._members))
        require_enough(self._members, self._cfg.min_servers)

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int, deliver: Deliver | None = None
    ) -> list[Rollout]:
        async def group(prompt: Prompt) -> list[Rollout]:
            rollouts = await self._group(prompt, sampling, seed)
            if deliver is not None:
                deliver(rollouts)
            return rollouts

        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(group(prompt)) for prompt in prompts]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [rollout for group in groups for rollout in group.result()]

    async def _group(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """Return one prompt's samples.

        Responses that a weight update cut off are continued, or sampled again, until all are complete.
        """
        whole = GenerationRequest(prompt, sampling.after(prompt), seed)
        group = await self._answer([whole])
        while lacking := continuations(group, prompt, whole.sampling, seed):
            if self._cfg.in_flight == "restart":
                group = await self._answer([whole])
                continue
            ends = await self._answer(list(lacking.values()))
            for place, end in zip(lacking, ends, strict=True):
                group[place] = merge(group[place], end)
        return group

    async def _answer(self, asks: Sequence[GenerationRequest]) -> list[Rollout]:
        """Return the requested samples, all from one server. Retries on other servers."""
        avoid: Endpoint | None = None
        for attempt in range(1, self._cfg.attempts + 1):
            member, life = await self._free(avoid)
            with _occupied(member.endpoint):
                try:
                    rollouts = await member.endpoint.generate(asks)
                    member.delivered()
                    return rollouts
                except RequestFailed as e:
                    if e.refused:
                        raise RolloutError(f"{member.endpoint.name} {e.what}") from None
                    error = await member.failed(life, e)
                except RolloutError as e:
                    error = e
                    if isinstance(e, StaleWeights):
                        life.end(e)
                finally:
                    await self._tell()
            avoid = member.endpoint
            if attempt < self._cfg.attempts:
                self._event(f"prompt {asks[0].prompt.id} is sampled again: {str(error).splitlines()[0]}")
                await asyncio.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
        raise error

    async def _free(self, avoid: Endpoint | None) -> tuple[ServerSlot[Endpoint], Incarnation]:
        """Wait for and return the least loaded server with a free slot, preferring others to `avoid`. Raises RolloutError."""
        while True:
            async with self._changed:
                require_enough(self._members, self._cfg.min_servers)
                serving = [(m, m.life) for m in self._members if m.life is not None and m.endpoint.version == self._version]
                if self._rest.asleep:
                    serving = []  # requests that their caller has abandoned
                free = [each for each in serving if each[0].endpoint.in_flight < self._cfg.server.concurrency]
                if self._cfg.only and not serving:
                    refuse_other_weights(self._members)
                if free:
                    return min(free, key=lambda each: (each[0].endpoint is avoid, each[0].endpoint.in_flight))
                await self._changed.wait()

    async def _begin(self, version: int) -> None:
        self._version = version
        broken_off = [life for _, life in self._updating]
        for member, life in self._updating:
            life.end(RolloutError(f"{member.endpoint.name} was given weights half-way"))
        self._gather_behind(broken_off)
        await self._until_idle()
        if not self._rest.asleep and await self._renew_grown():
            self._gather_behind(broken_off)
        await self._each(lambda endpoint: endpoint.begin_update(version))

    def _gather_behind(self, broken_off: Sequence[Incarnation]) -> None:
        """Select the servers of this update: those that are up and lack its version.

        Incarnations that took part in an unfinished update are left out.
        """
        behind = [(m, m.life) for m in self._members if m.life is not None and m.endpoint.version != self._version]
        self._updating = [(m, life) for m, life in behind if life not in broken_off]
        self._bases = {m.endpoint.version for m, _ in self._updating}

    async def _renew_grown(self) -> bool:
        """Restart the idle servers of the update whose memory has grown too far. Return whether there were any.

        The restarted servers come back with their first weights and take part in the update like the others. Raises
        RolloutError if too few servers are left.
        """
        ended = await self._growth.end_grown(self._updating)
        if not ended:
            return False
        async with self._changed:
            await self._changed.wait_for(lambda: all(m.lost or m.life not in (None, life) for m, life in ended))
        require_enough(self._members, self._cfg.min_servers)
        return True

    async def _until_idle(self) -> None:
        """Wait until no request with the former weights runs, and abort the requests if `rollout.in_flight` says so.

        The servers of the update get no new requests meanwhile.
        """

        def busy_ones() -> list[tuple[ServerSlot, Incarnation]]:
            return [(m, life) for m, life in self._updating if m.life is life and m.endpoint.in_flight]

        while busy := busy_ones():
            wait = None
            if self._cfg.in_flight != "finish":
                wait = INTERRUPT_SECONDS
                results = await asyncio.gather(*(m.endpoint.interrupt() for m, _ in busy), return_exceptions=True)
                for (member, life), result in zip(busy, results, strict=True):
                    if isinstance(result, RequestFailed):
                        await member.failed(life, result)
                    elif result is not None:
                        raise result
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait), self._changed:
                    await self._changed.wait_for(lambda: not busy_ones())

    async def _each(self, say: Callable[[Endpoint], Awaitable[None]]) -> None:
        """Make one call of an update to every server whose incarnation took part in it from the start, concurrently.

        Raises:
            SyncError: A server refused the call. The fleet is then no longer usable.
        """
        alive = [(m, life) for m, life in self._updating if m.life is life]
        results = await asyncio.gather(*(say(m.endpoint) for m, _ in alive), return_exceptions=True)
        for (member, life), result in zip(alive, results, strict=True):
            if isinstance(result, RequestFailed):
                await member.failed(life, result)
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

    async def _verify(self, sent: Mapping[str, int]) -> None:
        asked = [(m, m.life) for m in self._members if m.life is not None and m.endpoint.version == self._version]
        results = await asyncio.gather(*(m.endpoint.checksums() for m, _ in asked), return_exceptions=True)
        answers: dict[str, Mapping[str, str]] = {}
        for (member, life), result in zip(asked, results, strict=True):
            if isinstance(result, RequestFailed):
                await member.failed(life, result)
            elif isinstance(result, BaseException):
                raise result
            elif result is not None:
                answers[member.endpoint.name] = result
        try:
            self._checks.compare(self._version, answers, sent)
        except SyncError:
            self._refused = f"the check of version {self._version} failed"
            raise

    def _event(self, text: str) -> None:
        self._events.append(text)

    async def _tell(self) -> None:
        """Wake all tasks that wait for a change of a server's state."""
        async with self._changed:
            self._changed.notify_all()


@contextmanager
def _occupied(endpoint: Endpoint) -> Iterator[None]:
    endpoint.in_flight += 1
    try:
        yield
    finally:
        endpoint.in_flight -= 1
