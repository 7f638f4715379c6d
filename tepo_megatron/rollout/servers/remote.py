"""Servers that others start: at a URL that is given, or wherever `tepo serve` has them.

They take part in a fleet like servers of our own, which is why `end` matters: what comes up after it must serve its first
weights. `tepo serve` starts a server again when asked to. At a URL nobody does: there the label of the weights tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import ConfigError, RolloutError
from tepo_megatron.rollout.engine import Address, Launch
from tepo_megatron.rollout.servers.client import healthy
from tepo_megatron.rollout.servers.rendezvous import KEY_VARIABLE, Record, Rendezvous, fingerprint, key_from_environment

POLL_SECONDS = 0.5


class _Elsewhere:
    """What is known here of a process that another watches."""

    resident_bytes = 0  # it has memory of its own

    def forget(self) -> None:
        """Nothing of it is here."""


class NamedServer(_Elsewhere):
    """See `engine.Server`: whatever answers at `url`."""

    again = "is waited for"
    running = True

    def __init__(self, name: str, cfg: ServerConfig, launch: Launch, url: str) -> None:
        self.name = f"{name} ({url})"
        self._url, self._ready_seconds = url, cfg.ready_limit(launch.platform)
        self._deadline = 0.0

    def launch(self) -> None:
        """Raises ConfigError without a key."""
        if key_from_environment() is None:
            raise ConfigError(f"rollout.server.urls: {KEY_VARIABLE} is not set; set it to the key of these servers")
        self._deadline = time.monotonic() + self._ready_seconds

    async def reached(self) -> Address:
        """Raises RolloutError when it is not healthy `rollout.server.ready_seconds` after `launch`."""
        while not await healthy(self._url):
            if time.monotonic() > self._deadline:
                raise RolloutError(
                    f"{self.name} did not answer /health with 200 within {self._ready_seconds:g} s; start it, or raise "
                    "rollout.server.ready_seconds"
                )
            await asyncio.sleep(POLL_SECONDS)
        return Address(self._url, key_from_environment() or "")

    async def failure(self, what: str) -> RolloutError:
        """Where to look."""
        return RolloutError(f"{self.name} {what}; see its log (its key is the one in {KEY_VARIABLE}), and start it again")

    async def end(self) -> None:
        """Nothing can be done to it."""

    def stop(self) -> None:
        """It is left to whoever started it."""


class FoundServer(_Elsewhere):
    """See `engine.Server`: any server of a rendezvous that no other run uses.

    A start of one serves one process of one run: what another left behind may be half an update. So a start that was taken
    before is asked to end, by the run that took it; one of another run is refused. engine: as `rollout.engine` names it; run:
    who takes them; used: starts that are no longer to be had, shared by all servers of the fleet.
    """

    again = "is started again"

    def __init__(
        self,
        name: str,
        cfg: ServerConfig,
        launch: Launch,
        rendezvous: Rendezvous,
        *,
        engine: str,
        run: Path,
        used: set[str],
    ) -> None:
        self.name = name
        self._cfg, self._launch, self._rendezvous = cfg, launch, rendezvous
        self._engine, self._run, self._used = engine, str(run.resolve()), used
        self._record: Record | None = None
        self._looking, self._deadline, self._ready_seconds = False, 0.0, cfg.ready_limit(launch.platform)

    def launch(self) -> None:
        """Begin to look."""
        self._looking, self._deadline = True, time.monotonic() + self._ready_seconds

    @property
    def start(self) -> str | None:
        """That it has."""
        return None if self._record is None else self._record.start

    @property
    def running(self) -> bool:
        """Whether it is there, or may be soon."""
        return self._looking or self._record is not None

    async def reached(self) -> Address:
        """Raises RolloutError when none is found within `rollout.server.ready_seconds`, ConfigError for one of no use."""
        try:
            return await self._found()
        finally:
            self._looking = False

    async def _found(self) -> Address:
        while True:
            key = await asyncio.to_thread(self._rendezvous.key)
            records = await asyncio.to_thread(self._rendezvous.records)
            for record in records if key else ():
                over = record.start in self._used or self._rendezvous.ended(record) is not None
                if over or not await healthy(record.url) or record.start in self._used:  # another of ours may have been faster
                    continue
                self._used.add(record.start)
                self._check(record)
                if self._take(record):
                    self._record = record
                    return Address(record.url, key or "")
            if time.monotonic() > self._deadline:
                seen = ", ".join(record.where for record in records) or "none"
                turn = await asyncio.to_thread(self._rendezvous.turn)
                mend = "if that run was killed, remove the file `turn`"
                whose = "" if turn is None else f". None is started in the turn of {turn.run}; {mend}"
                raise RolloutError(
                    f"{self.name}: no free server in rollout.server.rendezvous={self._rendezvous.folder} within "
                    f"{self._ready_seconds:g} s; start `tepo serve` with this config, lower rollout.servers, or raise "
                    f"rollout.server.ready_seconds. Servers that were there, healthy or not: {seen}{whose}"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def failure(self, what: str) -> RolloutError:
        """Where to look."""
        return RolloutError(f"{self.name} {f'at {self._record.where} ' if self._record else ''}{what}")

    async def end(self) -> None:
        """Have `tepo serve` start it again."""
        await asyncio.to_thread(self._give_back, "a trainer found it ill")

    def stop(self) -> None:
        """Leave it as it was found: with its first weights."""
        self._give_back("its run is over")

    def _give_back(self, why: str) -> None:
        record, self._record = self._record, None
        if record is not None:
            with contextlib.suppress(OSError, RolloutError):  # the folder went with those who served
                self._rendezvous.end(record, f"{why} ({self._run})")

    def _take(self, record: Record) -> bool:
        """Whether this start is ours. Raises ConfigError where it is another run's."""
        taken = self._rendezvous.take(record, self._run)
        if not taken:
            return taken is None
        if taken != self._run:
            raise ConfigError(
                f"{record.where} is used by the run {taken}; wait for its end, use another rollout.server.rendezvous, or, if "
                f"that run was killed, end its servers and start them again"
            )
        self._rendezvous.end(record, f"a process of the run that was killed used it ({self._run})")
        return False

    def _check(self, record: Record) -> None:
        """Raise ConfigError naming all that makes it another server than this run would start."""
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
