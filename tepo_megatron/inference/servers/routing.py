"""Sampling on several servers: each request goes to the least loaded one, and to another if it fails.

A prompt's group is one request to one server (its samples share the prefix cache). Each group is delivered once: only a
complete answer counts.
"""

import asyncio
from collections.abc import Mapping, Sequence

from tepo_megatron.config import RolloutConfig
from tepo_megatron.errors import RolloutError
from tepo_megatron.inference.engine import Deliver, GroupStream
from tepo_megatron.inference.engine_api import StaleWeights
from tepo_megatron.inference.loop import QueuedGroupStream
from tepo_megatron.inference.partial import GenerationRequest, continuations, merge
from tepo_megatron.inference.report import EngineReport
from tepo_megatron.inference.request_spans import add_request
from tepo_megatron.inference.servers.client import RequestFailed
from tepo_megatron.inference.servers.endpoint import Endpoint
from tepo_megatron.inference.servers.observation import LoadMeter, observe
from tepo_megatron.inference.servers.pool import ServerPool
from tepo_megatron.inference.servers.slot import Incarnation
from tepo_megatron.observability.tracer import tracer
from tepo_megatron.types import Prompt, Rollout, SamplingParams

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
        return QueuedGroupStream(self._pool.loop, self._generate)

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
        """Return one prompt's samples."""
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
            made = tracer.clock()
            member, incarnation = await self._pool.acquire(avoid)
            answers, sent = None, tracer.clock()
            try:
                answers = await member.endpoint.generate(asks)
            except RequestFailed as e:
                if e.refused:
                    raise RolloutError(f"{member.endpoint.name} {e.what}") from None
                error = await member.failed(incarnation, e)
            except RolloutError as e:
                error = _noted(e, incarnation)
            finally:  # the request is over; the server does not wait until its answer is decoded
                await self._pool.release(member)
            if answers is not None:
                answered = tracer.clock()
                try:
                    brief = answers.nbytes <= BRIEF_BYTES
                    rollouts = answers.decode() if brief else await asyncio.to_thread(answers.decode)
                except RolloutError as e:
                    error = _noted(e, incarnation)
                else:
                    member.delivered()
                    member.endpoint.response_tokens += sum(rollout.response_length for rollout in rollouts)
                    add_request(asks, member.endpoint.name, (made, sent, answered, tracer.clock()))
                    return rollouts
            avoid = member.endpoint
            if attempt < ATTEMPTS:
                self._pool.event(f"prompt {asks[0].prompt.id} is sampled again: {str(error).splitlines()[0]}")
                await asyncio.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
        raise error


def _noted(error: RolloutError, incarnation: Incarnation) -> RolloutError:
    if isinstance(error, StaleWeights):
        incarnation.end(error)
    return error
