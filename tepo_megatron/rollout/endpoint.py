"""One inference server of this machine: its process, its connections, and the version of the weights that it serves."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import RolloutError, SyncError
from tepo_megatron.rollout.client import Client, RequestFailed
from tepo_megatron.rollout.engine import (
    DISCARDED_VERSION,
    ENGINE_PARTS,
    INITIAL_VERSION,
    EngineApi,
    EnginePart,
    Launch,
    Send,
)
from tepo_megatron.rollout.served_model import without_generation_config
from tepo_megatron.rollout.server import LOOPBACK, ServerProcess, choose_port
from tepo_megatron.types import Prompt, Rollout, SamplingParams

# A dead engine closes its connections first and ends a moment later; waiting for that makes the error name the cause.
DEATH_SECONDS = 1.0


class Endpoint:
    """A server, started again and again by its fleet. All methods but `stop` run in the fleet's event loop.

    name: in messages; log_path: the server's log.
    """

    def __init__(self, name: str, api: EngineApi, cfg: ServerConfig, launch: Launch, log_path: Path) -> None:
        self.name, self.api = name, api
        self._cfg, self._launch, self._log_path = cfg, launch, log_path
        self.version = INITIAL_VERSION
        self._coming = INITIAL_VERSION  # the version of the update under way
        self.in_flight = 0  # requests
        self.asleep: frozenset[EnginePart] = frozenset()  # what it has released
        self.process: ServerProcess | None = None
        self.client: Client | None = None
        self._served_model: tempfile.TemporaryDirectory[str] | None = None

    def launch(self) -> None:
        """Start the process; returns at once. Raises RolloutError (busy port, unwritable log), ConfigError (not installed)."""
        port, key = choose_port(self._cfg.port), secrets.token_urlsafe(32)
        url = f"http://{LOOPBACK}:{port}"
        if self._served_model is None:
            self._served_model = without_generation_config(self._launch.model_path)
        launch = replace(self._launch, model_path=Path(self._served_model.name))
        process = ServerProcess(
            self.api.command(self._cfg, launch, port),
            env=self.api.environment(self._cfg, launch, os.environ, key),
            health_url=f"{url}/health",
            log_path=self._log_path,
            ready_seconds=self._cfg.ready_seconds,
            name=self.name,
        )
        process.start()
        self.process, self.version, self.asleep = process, INITIAL_VERSION, frozenset()
        cfg = self._cfg
        self.client = Client(url, key, request_seconds=cfg.request_seconds, silent_seconds=cfg.silent_seconds)

    async def ready(self) -> None:
        """Return when the server takes requests and weights. Raises RolloutError."""
        process, client = self._running()
        await asyncio.to_thread(process.wait_ready)
        try:
            await self.api.prepare(client.send)
        except RequestFailed as e:
            raise await self.failure(e.what) from None

    async def generate(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """The samples of one prompt, of the version served. Raises RequestFailed, and RolloutError for an answer that is not
        what was asked for.
        """
        _, client = self._running()
        return await self.api.generate(client.send, prompt, sampling, seed, self.version)

    async def begin_update(self, version: int) -> None:
        """New weights are to come. Raises (as the other two) SyncError when the server refuses them, RequestFailed when it
        cannot be reached; it can no longer be trusted then, nor after an update that was broken off: servers stay healthy and
        keep their old version after an update that failed half-way.
        """
        self.version, self._coming = INITIAL_VERSION, version
        await self._updating(self.api.begin_update)

    async def load(self, files: Sequence[Path]) -> None:
        """Load the tensors of these files."""
        await self._updating(lambda send: self.api.load(send, files))

    async def finish_update(self) -> None:
        """Serve what was loaded."""
        await self._updating(lambda send: self.api.finish_update(send, self._coming))
        self.version = self._coming

    async def _updating(self, say: Callable[[Send], Awaitable[None]]) -> None:
        _, client = self._running()
        try:
            await say(client.send)
        except RequestFailed as e:
            if e.answered:
                raise SyncError(f"weights of version {self._coming}: {self.name} {e.what}") from None
            raise

    async def sleep(self) -> None:
        """Release weights and KV cache. Raises (as `wake`) RequestFailed, and RolloutError for an answer that is not what was
        asked for; what memory it holds is not known then.
        """
        _, client = self._running()
        await client.rest()
        self.version = DISCARDED_VERSION
        await self.api.sleep(client.send)
        self.asleep = frozenset(ENGINE_PARTS)

    async def wake(self, part: EnginePart) -> None:
        """Take the memory of `part` again."""
        _, client = self._running()
        await self.api.wake(client.send, part)
        self.asleep -= {part}
        if not self.asleep:
            client.rise()

    async def failure(self, what: str) -> RolloutError:
        """An error that says `what` the server did, whether it died of it, and how its log ends."""
        process, _ = self._running()
        await asyncio.to_thread(process.ends_within, DEATH_SECONDS)
        return process.failure(what)

    @property
    def running(self) -> bool:
        """Whether its first process lives."""
        return self.process is not None and self.process.running

    @property
    def resident_bytes(self) -> int:
        """Of its processes, in host memory."""
        return 0 if self.process is None else self.process.resident_bytes

    def stop(self) -> None:
        """End the server and its processes, bounded in time. May be called again, and before `launch`; from any thread."""
        if self.process is not None:
            self.process.stop()

    async def close(self) -> None:
        """End at once all that is left of an ill server."""
        if self.process is not None:
            await asyncio.to_thread(self.process.stop, at_once=True)
        if self.client is not None:
            await self.client.close()
        self.client = None

    def forget(self) -> None:
        """Remove what lay on the disk for the server's sake."""
        if self._served_model is not None:
            self._served_model.cleanup()
        self._served_model = None

    def _running(self) -> tuple[ServerProcess, Client]:
        if self.process is None or self.client is None:
            raise RolloutError(f"{self.name} is not running")
        return self.process, self.client
