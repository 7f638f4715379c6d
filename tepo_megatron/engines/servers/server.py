"""A server behind an endpoint: how it is started, reached and ended, wherever it runs.

This process starts, watches and ends it; or others do, at a given URL or by a `tepo serve` that connects to this run
(`listener.py`). They take part in a fleet like servers that this process starts. That is why `end` matters: the next start must
serve its first weights. `tepo serve` restarts a server on request. At a URL nobody does that; there the label of the weights
shows it.
"""

import asyncio
import os
import secrets
import socket
import time
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from tepo_megatron.base.errors import ConfigError, RolloutError
from tepo_megatron.config import AnyServerConfig, ServerConfig
from tepo_megatron.engines.engine_api import EngineApi, LaunchSpec
from tepo_megatron.engines.servers.client import healthy
from tepo_megatron.engines.servers.environment import ServedModel
from tepo_megatron.engines.servers.listener import OfferedServer, RunListener
from tepo_megatron.engines.servers.process import LOOPBACK, ServerProcess, hold_port
from tepo_megatron.engines.servers.rendezvous import KEY_VARIABLE, key_from_environment


@dataclass(frozen=True)
class ServerAddress:
    """URL of a server, and the key that it requires."""

    url: str
    key: str


class Server(Protocol):
    """Server behind an endpoint: a process of this machine (`servers/local.py`) or one of others (`servers/remote.py`)."""

    name: str
    restart_note: str

    def launch(self) -> None:
        """Start the server, the first time and after each `end`. Returns at once. Raises RolloutError, ConfigError."""

    async def wait_ready(self) -> ServerAddress:
        """Return the address once the server takes requests.

        Raises RolloutError if it fails, ConfigError if it does not fit the run.
        """

    async def failure(self, what: str) -> RolloutError:
        """Return an error that says `what` the server did, and where to look."""

    @property
    def running(self) -> bool:
        """Return whether the server is alive, as far as this is known without a request."""

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the server's processes on this machine, in bytes."""

    async def end(self) -> None:
        """End this start of the server at once. The next start serves its first weights."""

    def stop(self) -> None:
        """Release the server at the end of the run; bounded in time.

        May be called again, before `launch`, and from any thread.
        """

    def forget(self) -> None:
        """Remove the files that were made for the server."""


# Limit since a broken connection: a dying engine ends a moment later, which lets the error name the cause; then it names none
DEATH_SECONDS = 1.0


class LocalServer:
    """Implementation of `server.Server` for a process of this machine."""

    restart_note = "is started again"

    def __init__(
        self, name: str, api: EngineApi, cfg: ServerConfig, launch: LaunchSpec, log_path: Path, key: str | None = None
    ) -> None:
        self.name, self.log_path = name, log_path
        self._api, self._cfg, self._launch, self._key = api, cfg, launch, key
        self.process: ServerProcess | None = None
        self.address: ServerAddress | None = None
        self._door: socket.socket | None = None  # keeps the port from others until the server listens there
        self._served: ServedModel | None = None

    def launch(self) -> None:
        self._let_go()
        self._door = hold_port(0, self._launch.host)
        port, key = int(self._door.getsockname()[1]), self._key or secrets.token_urlsafe(32)
        url = url_of(self._launch.host, port)
        if self._served is None:
            self._served = ServedModel.create(self._launch.model_path, self._launch.in_fp8)
        launch = replace(self._launch, model_path=self._served.path)
        inherited = os.environ | {"TMPDIR": str(self._served.scratch)}
        process = ServerProcess(
            self._api.command(self._cfg, launch, port),
            env=self._api.environment(self._cfg, launch, inherited, key),
            health_url=f"{url}/health",
            log_path=self.log_path,
            ready_seconds=self._cfg.ready_seconds,
            name=self.name,
            folder=self._served.folder,
        )
        process.start()
        self.process, self.address = process, ServerAddress(url, key)

    async def wait_ready(self) -> ServerAddress:
        if self.process is None or self.address is None:
            raise RolloutError(f"{self.name} is not running")
        try:
            await asyncio.to_thread(self.process.wait_ready)
        finally:
            self._let_go()
        return self.address

    async def failure(self, what: str) -> RolloutError:
        """Return an error that says `what` the server did, whether it died of it, and how its log ends."""
        if self.process is None:
            return RolloutError(f"{self.name} {what}")
        await asyncio.to_thread(self.process.ends_within, DEATH_SECONDS)
        return self.process.failure(what)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.running

    @property
    def resident_bytes(self) -> int:
        """Sum of the resident set sizes of the server's processes, in bytes."""
        return 0 if self.process is None else self.process.resident_bytes

    async def end(self) -> None:
        """End what is left of the server, without the grace period, which is of no use to an ill server."""
        if self.process is not None:
            await asyncio.to_thread(self.process.stop, at_once=True)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()

    def forget(self) -> None:
        """Remove the links to the model, and the server's temporary files next to them."""
        if self._served is not None:
            self._served.remove()
        self._served = None
        self._let_go()

    def _let_go(self) -> None:
        if self._door is not None:
            self._door.close()
        self._door = None


def url_of(host: str, port: int) -> str:
    """Return the URL of a server. If it listens on all addresses, the URL uses the loopback address of this machine."""
    if host in ("0.0.0.0", "::"):
        host = LOOPBACK if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
