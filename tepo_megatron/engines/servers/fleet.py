"""Several inference servers as one RolloutEngine, which samples on all of them.

A server is used only while it is healthy and serves the fleet's version of the weights. A failed server is ended and restarted.
It is used again once it has received the weights again, which `needs_weights` asks the trainer for.

Each request goes to the least loaded server, and to another if it fails. A prompt's group is one request to one server (its
samples share the prefix cache). Each group is delivered once: only a complete answer counts.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Self

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import RolloutConfig
from tepo_megatron.engines.engine import (
    Deliver,
    EnginePart,
    EngineReport,
    GenerationRequest,
    GroupStream,
    ServerReport,
    ServerState,
    continuations,
    merge,
)
from tepo_megatron.engines.engine_api import StaleWeights
from tepo_megatron.engines.servers.client import RequestFailed
from tepo_megatron.engines.servers.endpoint import Endpoint, add_request
from tepo_megatron.engines.servers.listener import RunListener
from tepo_megatron.engines.servers.pool import ServerPool
from tepo_megatron.engines.servers.slot import Incarnation, ServerSlot
from tepo_megatron.engines.servers.updates import PoolUpdates
from tepo_megatron.monitor.tracer import tracer

METRICS_ROUTE = "/metrics"  # of vLLM and of SGLang
MOST_SERVER_BYTES = 4 * 2**20  # of the text of one server
UP, BETWEEN, LOST = 1.0, 0.5, 0.0  # takes requests; is being started or ended; is not started again
ATTEMPTS = 3  # to sample a prompt, on other servers where there are some
BRIEF_BYTES = 2**15  # answers up to this size are decoded in the event loop, because handing them to a thread costs CPU time
RETRY_SECONDS = 0.2  # before a request is sent again, doubled each time


class RoutedSampler:
    """Implementation of `engine.Sampler` on a pool of servers."""

    def __init__(self, pool: ServerPool, cfg: RolloutConfig) -> None:
        self._pool, self._cfg, self._load = pool, cfg, LoadMeter(pool)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `Sampler.generate`: one request per prompt, at most `rollout.server.concurrency` at once on each server.

        A failed request is sent again, to another server if there is one, up to ATTEMPTS times. A request that a
        server rejects (4xx) fails the call at once.
        """
        self._require_service()
        return self._pool.loop.run(self._generate(prompts, sampling, seed))

    def open(self) -> GroupStream:
        """See `Sampler.open`. Requests are routed and retried as in `generate`."""
        self._require_service()
        return GroupStream(self._pool.loop, self._generate)

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `Sampler.sample`: one request, routed and retried like those of `generate`, with the same errors."""
        self._require_service()
        return await asyncio.wrap_future(self._pool.loop.submit(self._group(prompt, sampling, seed)))

    def server_metrics(self) -> Mapping[str, float]:
        return self._load.read()

    def report(self, seconds: float) -> EngineReport:
        return self._pool.loop.run(observe(self._pool, seconds))

    def _require_service(self) -> None:
        self._pool.require_start()
        self._pool.require_trust()
        self._pool.sleeping.require_awake("sampling")

    # The rest runs in the event loop.

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
        whole = GenerationRequest(prompt, sampling, seed)
        group = await self._answer([whole])
        while lacking := continuations(group, prompt, whole.sampling, seed):
            if self._cfg.on_weight_update == "restart":
                group = await self._answer([whole])
                continue
            ends = await self._answer(list(lacking.values()))
            for place, end in zip(lacking, ends, strict=True):
                group[place] = merge(group[place], end)
        return group

    async def _answer(self, asks: Sequence[GenerationRequest]) -> list[Rollout]:
        avoid: Endpoint | None = None
        for attempt in range(1, ATTEMPTS + 1):
            begun = tracer.clock()
            member, incarnation = await self._pool.acquire(avoid)
            answers, sent = None, tracer.clock()
            try:
                answers = await member.endpoint.generate(asks)
            except RequestFailed as e:
                if e.refused:
                    raise RolloutError(f"{member.endpoint.name} {e.what}") from None
                error = await member.failed(incarnation, e)
            except RolloutError as e:
                error = _ended_if_stale(e, incarnation)
            finally:  # the request is over; the server does not wait until its answer is decoded
                await self._pool.release(member)
            if answers is not None:
                answered = tracer.clock()
                try:
                    brief = answers.nbytes <= BRIEF_BYTES
                    rollouts = answers.decode() if brief else await asyncio.to_thread(answers.decode)
                except RolloutError as e:
                    error = _ended_if_stale(e, incarnation)
                else:
                    member.delivered()
                    member.endpoint.response_tokens += sum(rollout.response_length for rollout in rollouts)
                    add_request(asks, member.endpoint.name, (begun, sent, answered, tracer.clock()))
                    return rollouts
            avoid = member.endpoint
            if attempt < ATTEMPTS:
                self._pool.event(f"prompt {asks[0].prompt.id} is sampled again: {str(error).splitlines()[0]}")
                await asyncio.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
        raise error


def _ended_if_stale(error: RolloutError, incarnation: Incarnation) -> RolloutError:
    """End a server that claims other weights than it was sent, and return the error."""
    if isinstance(error, StaleWeights):
        incarnation.end(error)
    return error


class LoadMeter:
    """The load of each server since the last reading. It only reads counters that the servers' event loop keeps anyway."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool, self._read_at = pool, time.monotonic()
        self._tokens: dict[int, int] = {}

    def read(self) -> dict[str, float]:
        """Return state, most requests at once, response tokens per second and restarts of each server, by key of the record."""
        now = time.monotonic()
        seconds, self._read_at = now - self._read_at, now
        metrics: dict[str, float] = {}
        for place, slot in enumerate(self._pool.slots):
            endpoint, tokens = slot.endpoint, slot.endpoint.response_tokens
            metrics |= {
                f"server/{place}/up": _up(slot),
                f"server/{place}/queue": float(endpoint.most_in_flight),
                f"server/{place}/tokens_per_second": (tokens - self._tokens.get(place, 0)) / max(seconds, 1e-9),
                f"server/{place}/restarts": float(slot.restart_count),
            }
            self._tokens[place], endpoint.most_in_flight = tokens, endpoint.in_flight
        return metrics


def _up(slot: ServerSlot[Endpoint]) -> float:
    return UP if slot.up else LOST if slot.lost is not None else BETWEEN


async def observe(pool: ServerPool, seconds: float) -> EngineReport:
    """Return the state of a pool, in whose event loop this runs. Metrics that do not come within `seconds` are left out."""
    asked = [slot for slot in pool.slots if slot.up and not slot.endpoint.asleep]
    texts = await asyncio.gather(*(_text(slot.endpoint, seconds) for slot in asked))
    return EngineReport(
        [_report(slot, pool.version) for slot in pool.slots],
        len(pool.waiting),
        pool.version,
        {slot.endpoint.name: text for slot, text in zip(asked, texts, strict=True) if text is not None},
    )


async def _text(endpoint: Endpoint, seconds: float) -> str | None:
    client = endpoint.client
    if client is None:
        return None
    try:
        answer = await client.exchange("GET", METRICS_ROUTE, most_bytes=MOST_SERVER_BYTES, seconds=seconds, repeatable=True)
    except (RequestFailed, RolloutError):
        return None
    return answer.text


def _report(slot: ServerSlot[Endpoint], version: int) -> ServerReport:
    endpoint = slot.endpoint
    return ServerReport(endpoint.name, _state(slot, version), endpoint.version, endpoint.in_flight, slot.restart_count)


def _state(slot: ServerSlot[Endpoint], version: int) -> ServerState:
    if slot.lost is not None:
        return "lost"
    if not slot.up:
        return "starting"
    if slot.endpoint.asleep:
        return "asleep"
    return "serving" if slot.endpoint.version == version else "waiting_for_weights"


class Fleet(RoutedSampler, PoolUpdates):
    """Implementation of `engine.RolloutEngine` on several servers. Its base classes share the pool of these servers.

    `endpoints`: the servers, in the order in which they were given. Only the fleet may call methods that change them.
    """

    def __init__(self, endpoints: Sequence[Endpoint], cfg: RolloutConfig, listener: RunListener | None = None) -> None:
        pool = ServerPool(endpoints, cfg, listener)
        RoutedSampler.__init__(self, pool, cfg)
        PoolUpdates.__init__(self, pool, cfg)
        self.endpoints = endpoints

    def start(self) -> None:
        """Launch all servers and return at once.

        Raises RolloutError (busy port, unwritable log), ConfigError (not installed).
        """
        self._pool.start()
        self.reset()

    def wait_ready(self) -> None:
        self._pool.wait_ready()

    def sleep(self, abort: bool = False) -> None:
        """See `Sleepable.sleep`. A server that fails to sleep is ended. No server is started while the fleet sleeps."""
        self._pool.require_start()
        self._pool.loop.run(self._pool.sleeping.sleep(self._pool.slots, abort))
        self._pool.require_enough()

    def wake(self, part: EnginePart) -> None:
        """See `Sleepable.wake`. A server that fails to wake is ended, and restarted once all parts are awake."""
        self._pool.require_start()
        self._pool.loop.run(self._pool.sleeping.wake(self._pool.slots, part))
        self._pool.require_enough()

    @property
    def asleep(self) -> frozenset[EnginePart]:
        return self._pool.sleeping.asleep

    @property
    def version(self) -> int:
        """Version of the weights of the last `begin_update`; INITIAL_VERSION before the first."""
        return self._pool.version

    @property
    def needs_weights(self) -> bool:
        """Return whether a healthy server waits for the weights of `version`."""
        return any(slot.endpoint.version != self._pool.version for slot, _ in self._pool.up())

    @property
    def slots(self) -> Sequence[ServerSlot[Endpoint]]:
        """The slots of all servers, in the order of `endpoints`; empty before `start`. Only the fleet may change them."""
        return self._pool.slots

    def take_events(self) -> list[str]:
        return self._pool.take_events()

    def resident_bytes(self) -> int:
        return sum(endpoint.resident_bytes for endpoint in self.endpoints)

    @property
    def restarts(self) -> int:
        return sum(slot.restart_count for slot in self._pool.slots)

    def close(self) -> None:
        self._pool.close()
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
