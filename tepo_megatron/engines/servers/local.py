"""A server that this process starts, watches and ends."""

import asyncio
import os
import secrets
import socket
from dataclasses import replace
from pathlib import Path

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.config import ServerConfig
from tepo_megatron.engines.engine_api import EngineApi, LaunchSpec
from tepo_megatron.engines.servers.process import LOOPBACK, ServerProcess, hold_port
from tepo_megatron.engines.servers.served_model import ServedModel
from tepo_megatron.engines.servers.server import ServerAddress

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
