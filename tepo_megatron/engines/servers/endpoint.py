"""One inference server as its users see it: its connection, and the version of the weights that it serves.

Only the `Server` behind it knows whether the server is a process of this machine or one that others started.

In the trace of a step, generation requests and weight updates have spans in the rows of the servers. A server reports how long
a request took until its first token and until its end, in the header `Server-Timing` of its answer. These are durations since
it read the request. They are placed so that they end when the answer has arrived, and are too late by the time that the answer
was on its way. What is left before them is the way to the server, and the wait until a busy server reads the request. Before
the first token a request waits in the engine's queue and is prefilled; no engine reports these apart.
"""

import asyncio
import functools
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import urlsplit

from tepo_megatron.base.errors import ConfigError, RolloutError, SyncError, excerpt
from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.types import Rollout
from tepo_megatron.config import AnyServerConfig
from tepo_megatron.engines.engine import ENGINE_PARTS, INITIAL_VERSION, UNKNOWN_VERSION, EnginePart, GenerationRequest
from tepo_megatron.engines.engine_api import INITIAL_LABEL, EngineApi, Send, ServerInfo
from tepo_megatron.engines.samples import answer_bytes
from tepo_megatron.engines.servers.client import Client, RequestFailed
from tepo_megatron.engines.servers.server import Server, ServerAddress
from tepo_megatron.monitor.tracer import tracer
from tepo_megatron.wire.broadcast_group import GroupSpec, UnchangedTensors
from tepo_megatron.wire.bucket_format import Source

Asked = TypeVar("Asked")
# Errors raised when an answer does not have the engine's shape.
_ODD_ANSWER = (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError)


def _odd(error: Exception) -> str:
    return f"answered with something other than was asked for ({excerpt(repr(error))})"


class ServerConnection:
    """A server across its restarts, and the connection to it. All methods run in one event loop."""

    def __init__(self, server: Server, api: EngineApi, cfg: AnyServerConfig) -> None:
        self.server, self.api, self._cfg = server, api, cfg
        self.client: Client | None = None
        self.address: ServerAddress | None = None
        self.info: ServerInfo | None = None

    @property
    def name(self) -> str:
        """Name of the server in messages."""
        return self.server.name

    def launch(self) -> None:
        """Start the server and return at once.

        Raises RolloutError (busy port, unwritable log), ConfigError (not installed, no key).
        """
        self.server.launch()

    async def ready(self) -> None:
        """Return when the server takes requests. Raises RolloutError, or ConfigError if the server does not fit the run."""
        cfg, address = self._cfg, await self.server.wait_ready()
        client = Client(address.url, address.key, request_seconds=cfg.request_seconds, heartbeat_timeout=cfg.heartbeat_timeout)
        self.client, self.address = client, address
        try:
            info = await self.api.server_info(client.send)
            self.info = replace(info, engine_version=excerpt(info.engine_version, 60))
            await self._greet(client, self.info)
        except RequestFailed as e:
            raise await self.server.failure(e.what) from None
        except _ODD_ANSWER as e:
            if isinstance(e, ConfigError):
                raise
            raise await self.server.failure(
                f"does not tell what it serves ({excerpt(repr(e))}); is this {self.api.name}?"
            ) from None

    async def _greet(self, client: Client, about: ServerInfo) -> None:
        """Hook for subclasses: the first requests to a healthy server."""

    async def close(self) -> None:
        """End this start of an ill server at once, and close the connection."""
        await self.server.end()
        await self.disconnect()

    async def disconnect(self) -> None:
        """Close the connection; requests in progress fail. The server goes on."""
        client, self.client = self.client, None
        if client is not None:
            await client.close()


@dataclass(frozen=True)
class UndecodedAnswers:
    """The answers to one call of `Endpoint.generate`.

    `decode`: returns the rollouts; see `Endpoint.decode`. May be called in any thread.
    """

    nbytes: int
    decode: Callable[[], list[Rollout]]


class Endpoint(ServerConnection):
    """A server of a fleet, with the version of its weights.

    Attributes:
        most_in_flight: Most requests that were in flight at once since `fleet.LoadMeter` last read it.
        answered: The server has answered a generation request since it was launched.
        broken_off: The sender of the last update is gone before its end.
    """

    def __init__(self, server: Server, api: EngineApi, cfg: AnyServerConfig, max_model_len: int) -> None:
        super().__init__(server, api, cfg)
        self._max_model_len, self.ranks = max_model_len, cfg.tp
        self.version = INITIAL_VERSION
        self._coming = INITIAL_VERSION  # target version of the update under way
        self.in_flight = self.most_in_flight = self.response_tokens = 0
        self.asleep: frozenset[EnginePart] = frozenset()
        self.answered = self.broken_off = False

    def launch(self) -> None:
        """See `ServerConnection.launch`. A new server starts awake."""
        super().launch()
        self.asleep, self.answered, self.broken_off = frozenset(), False, False

    @property
    def host(self) -> str:
        """Host name or address of the server, as seen from here. Raises RolloutError if it is not connected."""
        self._connected()
        assert self.address is not None
        return str(urlsplit(self.address.url).hostname)

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the server's processes on this machine, in bytes. 0 if others run the server."""
        return self.server.resident_bytes

    async def _greet(self, client: Client, about: ServerInfo) -> None:
        """Check that the server can serve the run, and find out whether it serves its initial weights."""
        if about.max_model_len < self._max_model_len:
            raise ConfigError(
                f"{self.name} takes sequences of {about.max_model_len} tokens, and this run asks for up to "
                f"{self._max_model_len} (data.max_prompt_tokens + rollout.max_response_tokens; for benchmarks "
                "data.max_prompt_tokens + evaluation.benchmark_tokens); start it for that many, or lower one of them"
            )
        await self.api.prepare(client.send)
        self.version = INITIAL_VERSION if about.label == INITIAL_LABEL else UNKNOWN_VERSION

    async def generate(self, asks: Sequence[GenerationRequest]) -> UndecodedAnswers:
        """Have the current `version` sample. Returns when the answers have arrived."""
        client, version = self._connected(), self.version
        seconds = self._cfg.generation_limit(sum(ask.sampling.samples * ask.sampling.max_tokens for ask in asks))

        send = functools.partial(client.send, repeatable=True)

        async def generate(ask: GenerationRequest) -> HttpAnswer:
            most, begun = answer_bytes(ask.prompt, ask.sampling), tracer.clock()
            exchange = functools.partial(client.exchange, most_bytes=most, seconds=seconds, repeatable=True)
            answer = await self._asked(self.api.generate(send, exchange, ask, version))
            add_generation(self.name, ask, version, begun, answer.timing)
            return answer

        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(generate(ask)) for ask in asks]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        self.answered = True
        received = [answer.result() for answer in answers]
        return UndecodedAnswers(sum(len(x.body) for x in received), functools.partial(self.decode, asks, received, version))

    def decode(self, asks: Sequence[GenerationRequest], answers: Sequence[HttpAnswer], version: int) -> list[Rollout]:
        """Return the requested samples, by request and sample index."""
        decoded = [self.api.decode(answer, ask, version) for ask, answer in zip(asks, answers, strict=True)]
        return [replace(rollout, servers=((0, self.name),)) for rollouts in decoded for rollout in rollouts]

    async def interrupt(self) -> None:
        """Abort the requests in flight; they are answered with the tokens sampled so far. Raises RequestFailed."""
        await self.api.interrupt(self._connected().send)

    async def begin_update(self, version: int) -> None:
        self.version, self._coming = UNKNOWN_VERSION, version
        try:
            await self._updating("begin update", lambda send: self.api.begin_update(send, self.broken_off))
        except SyncError as e:
            if self.broken_off:
                raise RequestFailed(f"was given weights half-way ({e})") from None
            raise
        self.broken_off = False

    async def keep_unchanged(self, base: int, names: Sequence[str]) -> None:
        """Announce the tensors that the update leaves unchanged."""
        unchanged = UnchangedTensors(self._coming, base, tuple(names))
        await self._updating("keep unchanged", lambda send: self.api.keep_unchanged(send, unchanged))

    async def join_groups(self, spec: GroupSpec) -> None:
        """Have the server's ranks join process groups with ranks of the trainer."""
        await self._updating("join groups", lambda send: self.api.join_groups(send, spec))

    async def load(self, sources: Sequence[Source]) -> None:
        await self._updating("load", lambda send: self.api.load(send, sources))

    async def finish_update(self) -> None:
        """Finish the update: the server serves the loaded weights. It gets requests once `version` is set."""
        await self._updating("finish update", lambda send: self.api.finish_update(send, self._coming))
        tracer.instant(f"weights of version {self._coming}", WEIGHTS, process=self.name)

    async def checksums(self) -> Mapping[str, str] | None:
        """See `EngineApi.checksums`.

        Raises SyncError if the server does not report them, RequestFailed if it cannot be reached.
        """
        return await self._updating("checksums", self.api.checksums, f"checksums of version {self.version}")

    async def _updating(self, name: str, say: Callable[[Send], Awaitable[Asked]], what: str = "") -> Asked:
        try:
            with tracer.span(name, WEIGHTS, process=self.name):
                return await say(self._connected().send)
        except RequestFailed as e:
            if e.answered:
                raise SyncError(f"{what or f'weights of version {self._coming}'}: {self.name} {e.what}") from None
            raise
        except _ODD_ANSWER as e:
            if isinstance(e, ConfigError):
                raise
            raise SyncError(f"{what or f'weights of version {self._coming}'}: {self.name} {_odd(e)}") from None

    async def sleep(self) -> None:
        """Release the memory of the weights and the KV cache."""
        client = self._connected()
        await client.pause()
        self.version = UNKNOWN_VERSION
        with tracer.span("sleep", WEIGHTS, process=self.name):
            await self._asked(self.api.sleep(client.send))
        self.asleep = frozenset(ENGINE_PARTS)

    async def wake(self, part: EnginePart) -> None:
        """Allocate the memory of `part` again. Raises as `sleep` does."""
        client = self._connected()
        with tracer.span(f"wake {part}", WEIGHTS, process=self.name):
            await self._asked(self.api.wake(client.send, part))
        self.asleep -= {part}
        if not self.asleep:
            client.resume()

    async def _asked(self, asking: Awaitable[Asked]) -> Asked:
        """Await an answer. Raises RolloutError if its shape is not the engine's, and what `asking` raises."""
        try:
            return await asking
        except _ODD_ANSWER as e:
            if isinstance(e, ConfigError):
                raise
            raise RolloutError(f"{self.name} {_odd(e)}") from None

    def _connected(self) -> Client:
        if self.client is None:
            raise RolloutError(f"{self.name} is not running")
        return self.client


REQUESTS, WEIGHTS = "requests", "weights"  # rows of a server
_TIMING = re.compile(r"first;dur=([0-9.]{1,20}), total;dur=([0-9.]{1,20})")
_LONGEST_MS = 1e9


def server_times(timing: str | None) -> tuple[int, int] | None:
    """Return the ns until the first token and until the end of a request; None if the server does not report them."""
    match = None if timing is None else _TIMING.fullmatch(timing)
    if match is None or any(text.count(".") > 1 or text == "." for text in match.groups()):
        return None
    first, total = (float(text) for text in match.groups())
    if not 0 <= first <= total <= _LONGEST_MS or not math.isfinite(total):
        return None
    return int(first * 1e6), int(total * 1e6)


def add_generation(server: str, ask: GenerationRequest, version: int, begun: int, timing: str | None) -> None:
    """Record a request that a server has just answered."""
    if not tracer.active:
        return
    ended, unit, prompt = tracer.clock(), tracer.unit(), ask.prompt
    facts = {"prompt": prompt.id, "prompt_tokens": len(prompt.token_ids), "samples": ask.sampling.samples, "version": version}
    tracer.add("generate", REQUESTS, begun, ended, process=server, unit=unit, flows=[prompt.id], **facts)
    if (times := server_times(timing)) is not None:
        first, total = times
        read = max(begun, ended - total)
        tracer.add("until it is read", REQUESTS, begun, read, process=server, unit=unit)
        tracer.add("queue and prefill", REQUESTS, read, read + min(first, ended - read), process=server, unit=unit)
        tracer.add("decode", REQUESTS, read + min(first, ended - read), ended, process=server, unit=unit)


def add_request(asks: Sequence[GenerationRequest], server: str, times: tuple[int, int, int, int]) -> None:
    """Record the service's side of requests that were answered by one server."""
    if not tracer.active:
        return
    (begun, sent, answered, parsed), unit, prompt = times, tracer.unit(), asks[0].prompt.id
    tracer.add("request", REQUESTS, begun, parsed, unit=unit, flows=[prompt], prompt=prompt, server=server)
    tracer.add("wait for a server", REQUESTS, begun, sent, unit=unit)
    tracer.add("in flight", REQUESTS, sent, answered, unit=unit)
    tracer.add("parse", REQUESTS, answered, parsed, unit=unit)
