"""One inference server as its users see it: its connections, and the version of the weights that it serves.

What the server is, a process of this machine or one that others started, is known to the `Server` behind it alone.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar
from urllib.parse import urlsplit

from tepo_megatron.channel import Kept, Meeting, Source
from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import ConfigError, RolloutError, SyncError
from tepo_megatron.escaping import excerpt
from tepo_megatron.rollout.cut import Ask
from tepo_megatron.rollout.engine import (
    ENGINE_PARTS,
    INITIAL_LABEL,
    INITIAL_VERSION,
    UNKNOWN_VERSION,
    About,
    Address,
    EngineApi,
    EnginePart,
    Send,
    Server,
)
from tepo_megatron.rollout.samples import answer_bytes
from tepo_megatron.rollout.servers.client import Client, RequestFailed
from tepo_megatron.types import Rollout

Asked = TypeVar("Asked")
# What reading an answer of another shape than the engine's raises.
_ODD_ANSWER = (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError)


def _odd(error: Exception) -> str:
    return f"answered with something other than was asked for ({excerpt(repr(error))})"


class Connected:
    """A server, brought up again and again, and the connections to it.

    All methods but `stop` and `forget` run in one event loop. client, address and about: since it was last `ready`.
    """

    def __init__(self, server: Server, api: EngineApi, cfg: ServerConfig) -> None:
        self.server, self.api, self._cfg = server, api, cfg
        self.client: Client | None = None
        self.address: Address | None = None
        self.about: About | None = None

    @property
    def name(self) -> str:
        """In messages."""
        return self.server.name

    def launch(self) -> None:
        """Have the server come up; returns at once. Raises RolloutError (busy port, unwritable log), ConfigError."""
        self.server.launch()

    async def ready(self) -> None:
        """Return when the server takes requests. Raises RolloutError, ConfigError when it is not what the run needs."""
        cfg, address = self._cfg, await self.server.reached()
        client = Client(address.url, address.key, request_seconds=cfg.request_seconds, silent_seconds=cfg.silent_seconds)
        self.client, self.address = client, address
        try:
            about = await self.api.about(client.send)
            self.about = replace(about, engine_version=excerpt(about.engine_version, 60))
            await self._greet(client, self.about)
        except RequestFailed as e:
            raise await self.failure(e.what) from None
        except _ODD_ANSWER as e:
            if isinstance(e, ConfigError):
                raise
            raise await self.failure(f"does not tell what it serves ({excerpt(repr(e))}); is this {self.api.name}?") from None

    async def _greet(self, client: Client, about: About) -> None:
        """What this user of it says first."""

    async def failure(self, what: str) -> RolloutError:
        """An error that says `what` the server did, whether it died of it, and where to look."""
        return await self.server.failure(what)

    @property
    def running(self) -> bool:
        """Whether it lives, as far as can be known without asking it."""
        return self.server.running

    def stop(self) -> None:
        """The run is over. May be called again, and before `launch`; from any thread."""
        self.server.stop()

    async def close(self) -> None:
        """End at once all that is left of an ill server."""
        await self.server.end()
        if self.client is not None:
            await self.client.close()
        self.client = None

    def forget(self) -> None:
        """Remove what lay on the disk for the server's sake."""
        self.server.forget()


class Endpoint(Connected):
    """A server of a fleet. max_model_len: tokens of the longest sequence that the run may ask for; ranks: processes that hold
    the model.
    """

    def __init__(self, server: Server, api: EngineApi, cfg: ServerConfig, max_model_len: int) -> None:
        super().__init__(server, api, cfg)
        self._max_model_len, self.ranks = max_model_len, cfg.tp
        self.version = INITIAL_VERSION
        self._coming = INITIAL_VERSION  # the version of the update under way
        self.in_flight = 0  # requests
        self.asleep: frozenset[EnginePart] = frozenset()  # what it has released
        self.answered = False  # a request, since it was launched

    def launch(self) -> None:
        """See `Connected.launch`; it comes up awake."""
        super().launch()
        self.asleep, self.answered = frozenset(), False

    @property
    def host(self) -> str:
        """Where it runs, as seen from here. RolloutError when it is not connected."""
        self._connected()
        assert self.address is not None
        return str(urlsplit(self.address.url).hostname)

    @property
    def resident_bytes(self) -> int:
        """Of its processes, in this machine's memory."""
        return self.server.resident_bytes

    async def _greet(self, client: Client, about: About) -> None:
        """Find out whether it can serve the run, and with which weights it begins."""
        if about.max_model_len < self._max_model_len:
            raise ConfigError(
                f"{self.name} takes sequences of {about.max_model_len} tokens, and this run asks for up to "
                f"{self._max_model_len} (rollout.max_sequence_tokens, or data.max_prompt_tokens + "
                "rollout.max_response_tokens; for benchmarks data.max_prompt_tokens + evaluation.benchmark_tokens); start it "
                "for that many, or lower one of them"
            )
        await self.api.prepare(client.send)
        self.version = INITIAL_VERSION if about.label == INITIAL_LABEL else UNKNOWN_VERSION

    async def generate(self, asks: Sequence[Ask]) -> list[Rollout]:
        """The samples that are asked for, of the version served. Raises RequestFailed, and RolloutError for an answer that is
        not what was asked for.
        """
        client, version = self._connected(), self.version

        async def generate(ask: Ask) -> list[Rollout]:
            send = functools.partial(client.send, most_bytes=answer_bytes(ask.prompt, ask.sampling))
            return await self._asked(self.api.generate(send, ask.prompt, ask.sampling, ask.seed, version))

        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(generate(ask)) for ask in asks]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        self.answered = True
        return [replace(rollout, servers=((0, self.name),)) for answer in answers for rollout in answer.result()]

    async def interrupt(self) -> None:
        """Have what is under way answered with what there is of it. Raises RequestFailed."""
        await self.api.interrupt(self._connected().send)

    async def begin_update(self, version: int) -> None:
        """New weights are to come. Raises (as the other four) SyncError when the server refuses them, RequestFailed when it
        cannot be reached; it can no longer be trusted then, nor after an update that was broken off: servers stay healthy and
        keep their old version after an update that failed half-way.
        """
        self.version, self._coming = UNKNOWN_VERSION, version
        await self._updating(self.api.begin_update)

    async def keep(self, base: int, names: Sequence[str]) -> None:
        """The update leaves these as they are in `base`."""
        await self._updating(lambda send: self.api.keep(send, Kept(self._coming, base, tuple(names))))

    async def join(self, meeting: Meeting) -> None:
        """Meet ranks of the trainer."""
        await self._updating(lambda send: self.api.join(send, meeting))

    async def load(self, sources: Sequence[Source]) -> None:
        """Load the tensors of these sources."""
        await self._updating(lambda send: self.api.load(send, sources))

    async def finish_update(self) -> None:
        """Serve what was loaded."""
        await self._updating(lambda send: self.api.finish_update(send, self._coming))
        self.version = self._coming

    async def checksums(self) -> Mapping[str, str] | None:
        """See `EngineApi.checksums`. Raises SyncError when it does not tell, RequestFailed when it cannot be reached."""
        try:
            return await self.api.checksums(self._connected().send)
        except RequestFailed as e:
            if e.answered:
                raise SyncError(f"checksums of version {self.version}: {self.name} {e.what}") from None
            raise
        except _ODD_ANSWER as e:
            raise SyncError(f"checksums of version {self.version}: {self.name} {_odd(e)}") from None

    async def _updating(self, say: Callable[[Send], Awaitable[None]]) -> None:
        try:
            await say(self._connected().send)
        except RequestFailed as e:
            if e.answered:
                raise SyncError(f"weights of version {self._coming}: {self.name} {e.what}") from None
            raise
        except _ODD_ANSWER as e:
            if isinstance(e, ConfigError):
                raise
            raise SyncError(f"weights of version {self._coming}: {self.name} {_odd(e)}") from None

    async def sleep(self) -> None:
        """Release weights and KV cache. Raises (as `wake`) RequestFailed, and RolloutError for an answer that is not what was
        asked for; what memory it holds is not known then.
        """
        client = self._connected()
        await client.rest()
        self.version = UNKNOWN_VERSION
        await self._asked(self.api.sleep(client.send))
        self.asleep = frozenset(ENGINE_PARTS)

    async def wake(self, part: EnginePart) -> None:
        """Take the memory of `part` again."""
        client = self._connected()
        await self._asked(self.api.wake(client.send, part))
        self.asleep -= {part}
        if not self.asleep:
            client.rise()

    async def _asked(self, asking: Awaitable[Asked]) -> Asked:
        """Its answer. Raises RolloutError where that has another shape than the engine's, and what `asking` raises."""
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
