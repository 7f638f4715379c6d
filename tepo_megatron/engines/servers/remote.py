"""Servers that others start: at a given URL, or those of each `tepo serve` that connects to this run (`listener.py`).

They take part in a fleet like servers that this process starts. That is why `end` matters: the next start must serve its first
weights. `tepo serve` restarts a server on request. At a URL nobody does that; there the label of the weights shows it.
"""

import asyncio
import time
from hashlib import sha256
from pathlib import Path

from tepo_megatron.base.errors import ConfigError, RolloutError
from tepo_megatron.config import AnyServerConfig
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.servers.client import healthy
from tepo_megatron.engines.servers.listener import OfferedServer, RunListener
from tepo_megatron.engines.servers.server import ServerAddress
from tepo_megatron.engines.servers.server_key import KEY_VARIABLE, key_from_environment

POLL_SECONDS = 0.2


def fingerprint(model: Path) -> str:
    """Return the SHA-256 of the model's config.json, in hexadecimal. Raises ConfigError if it cannot be read."""
    try:
        return sha256((model / "config.json").read_bytes()).hexdigest()
    except OSError as e:
        raise ConfigError(
            f"model.path={model}: cannot read config.json ({e.strerror}); give a Hugging Face directory"
        ) from None


class _RemoteServer:
    resident_bytes = 0  # its memory is not on this machine, or not known here

    def forget(self) -> None:
        pass


class NamedServer(_RemoteServer):
    """Implementation of `server.Server` for whatever answers at a URL."""

    restart_note = "is waited for"
    running = True

    def __init__(self, name: str, cfg: AnyServerConfig, url: str) -> None:
        self.name = f"{name} ({url})"
        self._url, self._ready_seconds = url, cfg.ready_seconds
        self._deadline = 0.0

    def launch(self) -> None:
        """Begin to wait for the server. Raises ConfigError if no key is set."""
        if key_from_environment() is None:
            raise ConfigError(f"rollout.server.urls: {KEY_VARIABLE} is not set; set it to the key of these servers")
        self._deadline = time.monotonic() + self._ready_seconds

    async def wait_ready(self) -> ServerAddress:
        """Wait until the server is healthy. Raises RolloutError if it is not `rollout.server.ready_seconds` after `launch`."""
        while not await healthy(self._url):
            if time.monotonic() > self._deadline:
                raise RolloutError(
                    f"{self.name} did not answer /health with 200 within {self._ready_seconds:g} s; start it, or raise "
                    "rollout.server.ready_seconds"
                )
            await asyncio.sleep(POLL_SECONDS)
        return ServerAddress(self._url, key_from_environment() or "")

    async def failure(self, what: str) -> RolloutError:
        return RolloutError(f"{self.name} {what}; see its log (its key is the one in {KEY_VARIABLE}), and start it again")

    async def end(self) -> None:
        """Do nothing: this process cannot restart the server."""

    def stop(self) -> None:
        """Do nothing: the server is left to whoever started it."""


class FoundServer(_RemoteServer):
    """Implementation of `server.Server` for any server of a `tepo serve` that no other slot uses.

    A start (incarnation) of a server serves one process of one run, because another process may have left half an update
    behind. So `tepo serve` ends the starts that a run has taken when its link to the run ends.
    """

    restart_note = "is started again"

    def __init__(self, name: str, cfg: AnyServerConfig, launch: LaunchSpec, listener: RunListener, *, engine: str) -> None:
        self.name = name
        self._cfg, self._launch, self._listener, self._engine = cfg, launch, listener, engine
        self._server: OfferedServer | None = None
        self._looking, self._deadline = False, 0.0

    def launch(self) -> None:
        self._looking, self._deadline = True, time.monotonic() + self._cfg.ready_seconds

    @property
    def running(self) -> bool:
        """Return whether a server was taken and is up, or is being looked for."""
        return self._looking or (self._server is not None and self._server.up)

    async def wait_ready(self) -> ServerAddress:
        try:
            while True:
                servers = self._listener.servers()
                for server in servers:
                    # another slot may be faster, and the server may end
                    if server.tried or not await healthy(server.url) or server.tried or not server.up:
                        continue
                    server.tried = True
                    self._check(server)
                    server.take()
                    while server.up and not server.taken and time.monotonic() < self._deadline:
                        await asyncio.sleep(POLL_SECONDS)
                    if server.up and server.taken:
                        self._server = server
                        return ServerAddress(server.url, self._listener.key)
                if time.monotonic() > self._deadline:
                    note = f". {self._listener.last_note}" if self._listener.last_note else ""
                    raise RolloutError(
                        f"{self.name}: no free server in rollout.server.rendezvous={self._listener.folder} within "
                        f"{self._cfg.ready_seconds:g} s; start `tepo serve` with this config, lower rollout.servers, or raise "
                        "rollout.server.ready_seconds. Servers that were there, healthy or not: "
                        f"{', '.join(server.where for server in servers) or 'none'}{note}"
                    )
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._looking = False

    async def failure(self, what: str) -> RolloutError:
        return RolloutError(f"{self.name} {f'at {self._server.where} ' if self._server else ''}{what}")

    async def end(self) -> None:
        """Have `tepo serve` restart the server."""
        server, self._server = self._server, None
        if server is not None:
            server.end(f"its run found it ill ({self._listener.run})")

    def stop(self) -> None:
        """Do nothing: `tepo serve` restarts the server when the run closes its links, for it to serve its first weights."""

    def _check(self, server: OfferedServer) -> None:
        """Raise ConfigError that lists all differences from the server that this run would start."""
        model, precision, tp = self._launch.model_path, self._launch.serves, self._cfg.tp
        serves = server.serve.facts
        faults = []
        if serves["engine"] != self._engine:
            faults.append(f"it is {serves['engine']}, and rollout.engine={self._engine}")
        if serves["model"] != fingerprint(model):
            faults.append(f"its model's config.json is not that of model.path={model}")
        if serves["precision"] != precision:
            key = "sync.quantize" if self._launch.in_fp8 else "rollout.server.precision or model.precision"
            faults.append(f"it serves {serves['precision']}, and {key} is {precision}")
        if serves["tp"] != tp:
            faults.append(f"it has {serves['tp']} tensor-parallel ranks, and rollout.server.tp={tp}")
        if self._launch.sleeps and not serves["sleeps"]:
            faults.append("it was not started to sleep, and rollout.colocate=true")
        if faults:
            raise ConfigError(f"{server.where}: {'; '.join(faults)}; start `tepo serve` with the config of this run")
