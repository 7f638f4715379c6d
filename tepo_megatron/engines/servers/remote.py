"""Servers that others start: at a given URL, or published by `tepo serve` in a rendezvous folder.

They take part in a fleet like servers that this process starts. That is why `end` matters: the next start must serve its first
weights. `tepo serve` restarts a server on request. At a URL nobody does that; there the label of the weights shows it.
"""

import asyncio
import contextlib
import time
from pathlib import Path

from tepo_megatron.base.errors import ConfigError, RolloutError
from tepo_megatron.config import AnyServerConfig
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.servers.client import healthy
from tepo_megatron.engines.servers.rendezvous import Rendezvous, ServerRecord, fingerprint
from tepo_megatron.engines.servers.server import ServerAddress
from tepo_megatron.engines.servers.server_key import KEY_VARIABLE, key_from_environment

POLL_SECONDS = 0.5


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
    """Implementation of `server.Server` for any server in a rendezvous folder that no other run uses.

    A start (incarnation) of a server serves one process of one run, because another process may have left half an update
    behind. So a start that an earlier process of the same run had taken is asked to end; one that another run has taken is
    refused.
    """

    restart_note = "is started again"

    def __init__(
        self,
        name: str,
        cfg: AnyServerConfig,
        launch: LaunchSpec,
        rendezvous: Rendezvous,
        *,
        engine: str,
        run: Path,
        used: set[str],
    ) -> None:
        self.name = name
        self._cfg, self._launch, self._rendezvous = cfg, launch, rendezvous
        self._engine, self._run, self._used = engine, str(run.resolve()), used
        self._record: ServerRecord | None = None
        self._looking, self._deadline, self._ready_seconds = False, 0.0, cfg.ready_seconds

    def launch(self) -> None:
        self._looking, self._deadline = True, time.monotonic() + self._ready_seconds

    @property
    def start(self) -> str | None:
        """Start id of the server that was taken; None if there is none."""
        return None if self._record is None else self._record.start

    @property
    def running(self) -> bool:
        """Return whether a server was taken, or is being looked for."""
        return self._looking or self._record is not None

    async def wait_ready(self) -> ServerAddress:
        try:
            return await self._found()
        finally:
            self._looking = False

    async def _found(self) -> ServerAddress:
        while True:
            key = await asyncio.to_thread(self._rendezvous.key)
            records = await asyncio.to_thread(self._rendezvous.records)
            for record in records if key else ():
                over = record.start in self._used or self._rendezvous.end_reason(record) is not None
                if over or not await healthy(record.url) or record.start in self._used:  # another slot may have been faster
                    continue
                self._used.add(record.start)
                self._check(record)
                if self._take(record):
                    self._record = record
                    return ServerAddress(record.url, key or "")
            if time.monotonic() > self._deadline:
                seen = ", ".join(record.where for record in records) or "none"
                lease = await asyncio.to_thread(self._rendezvous.leases.current)
                fix = "if that run was killed, remove the file `lease`"
                whose = "" if lease is None else f". None is started while {lease.run} has the devices; {fix}"
                raise RolloutError(
                    f"{self.name}: no free server in rollout.server.rendezvous={self._rendezvous.folder} within "
                    f"{self._ready_seconds:g} s; start `tepo serve` with this config, lower rollout.servers, or raise "
                    f"rollout.server.ready_seconds. Servers that were there, healthy or not: {seen}{whose}"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def failure(self, what: str) -> RolloutError:
        return RolloutError(f"{self.name} {f'at {self._record.where} ' if self._record else ''}{what}")

    async def end(self) -> None:
        """Ask `tepo serve` to restart the server."""
        await asyncio.to_thread(self._give_back, "a trainer found it ill")

    def stop(self) -> None:
        """Give the server back: `tepo serve` restarts it, so that it serves its first weights again."""
        self._give_back("its run is over")

    def _give_back(self, why: str) -> None:
        record, self._record = self._record, None
        if record is not None:
            with contextlib.suppress(OSError, RolloutError):  # the folder may be gone with `tepo serve`
                self._rendezvous.request_end(record, f"{why} ({self._run})")

    def _take(self, record: ServerRecord) -> bool:
        """Return whether this start is now reserved for this run. Raises ConfigError if another run uses it."""
        if not (taken := self._rendezvous.claim(record, self._run)):
            return taken is None
        if taken != self._run:
            raise ConfigError(
                f"{record.where} is used by the run {taken}; wait for its end, use another rollout.server.rendezvous, or, if "
                f"that run was killed, end its servers and start them again"
            )
        self._rendezvous.request_end(record, f"a process of the run that was killed used it ({self._run})")
        return False

    def _check(self, record: ServerRecord) -> None:
        """Raise ConfigError that lists all differences from the server that this run would start."""
        model, precision, tp = self._launch.model_path, self._launch.serves, self._cfg.tp
        faults = []
        if record.engine != self._engine:
            faults.append(f"it is {record.engine}, and rollout.engine={self._engine}")
        if record.model != fingerprint(model):
            faults.append(f"its model's config.json is not that of model.path={model}")
        if record.precision != precision:
            key = "sync.quantize" if self._launch.in_fp8 else "rollout.server.precision or model.precision"
            faults.append(f"it serves {record.precision}, and {key} is {precision}")
        if record.tp != tp:
            faults.append(f"it has {record.tp} tensor-parallel ranks, and rollout.server.tp={tp}")
        if self._launch.sleeps and not record.sleeps:
            faults.append("it was not started to sleep, and rollout.colocate=true")
        if faults:
            raise ConfigError(f"{record.where}: {'; '.join(faults)}; start `tepo serve` with the config of this run")
