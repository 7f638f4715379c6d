"""The device lease: which run has the devices of the machines on which `tepo serve` runs servers.

    HOST-PID.service  a running `tepo serve`, and the last lease token that it acknowledged
    lease             the lease: the run that has the devices, the starts that it keeps, and a token for the acknowledgements

`Quiesce` takes the lease for a trainer, and `serve.py` follows it.
"""

import asyncio
import dataclasses
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.engines.servers.shared_folder import read_file, replace_private

POLL_SECONDS = 0.1
_LEASE, _SERVICE = "lease", "service"


@dataclass(frozen=True)
class DeviceLease:
    """Device lease: `run` has the devices of the servers, and all starts except `starts` have to end."""

    run: str
    token: str  # `tepo serve` acknowledges the lease with it
    starts: tuple[str, ...]  # of servers of `run`, which has put them to sleep or is about to


class DeviceLeases:
    """The device lease of a rendezvous folder, and the `tepo serve` processes that have to acknowledge it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def killed(self) -> list[str]:
        """Return the registered `tepo serve` processes of this machine that are no longer there."""
        found = []
        for service, (machine, _) in self._registered().items():
            host, _, pid = service.rpartition("-")
            if host == this_host() and machine == _machine() and not Path("/proc", pid).exists():
                found.append(service)
        return found

    def register(self, service: str) -> None:
        """Register a `tepo serve` that begins. The first one finds no lease."""
        if not self._registered():
            self._write("{}")
        self.acknowledge(service, "")

    def acknowledge(self, service: str, token: str) -> None:
        """Acknowledge a lease for a `tepo serve`: it starts no server, and runs none except those that the lease keeps."""
        replace_private(self.folder / f"{service}.{_SERVICE}", f"{_machine()} {token}")

    def deregister(self, service: str) -> None:
        """Unregister a `tepo serve` whose servers have ended. The last one also removes the lease."""
        (self.folder / f"{service}.{_SERVICE}").unlink(missing_ok=True)
        if not self._registered():
            (self.folder / _LEASE).unlink(missing_ok=True)

    def acknowledgements(self) -> dict[str, str]:
        """Return service -> last acknowledged token of every registered `tepo serve`; empty string if it acknowledged none."""
        return {service: token for service, (_, token) in self._registered().items()}

    def missing(self, lease: DeviceLease) -> list[str]:
        """Return the registered `tepo serve` processes that have not acknowledged the lease."""
        return [service for service, token in self.acknowledgements().items() if token != lease.token]

    def take(self, run: str, starts: Sequence[str]) -> DeviceLease:
        """Write a new device lease and return it."""
        lease = DeviceLease(run, secrets.token_hex(8), tuple(starts))
        self._write(json.dumps(dataclasses.asdict(lease)))
        return lease

    def current(self) -> DeviceLease | None:
        """Return the current device lease; None if no run has one."""
        text = read_file(self.folder / _LEASE)
        said = {} if text is None else json.loads(text)
        return DeviceLease(said["run"], said["token"], tuple(said["starts"])) if said.get("run") else None

    def release(self, run: str) -> None:
        """End the lease of `run`, if it has one. The file stays: over NFS a new file is taken for missing for a long time."""
        if (lease := self.current()) is not None and lease.run == run:
            self._write("{}")

    def _registered(self) -> dict[str, tuple[str, str]]:
        found = {path.stem: read_file(path) for path in sorted(self.folder.glob(f"*.{_SERVICE}"))}
        return {service: (text.split(" ")[0], text.split(" ")[1]) for service, text in found.items() if text is not None}

    def _write(self, text: str) -> None:
        replace_private(self.folder / _LEASE, text)


class Quiesce:
    """Holds a run's device lease on the servers of a rendezvous folder, so that the trainer has their devices to itself.

    A `tepo serve` restarts a dead server whenever it likes, which takes a server's whole memory. So a run that wants the
    devices writes a `DeviceLease` into the rendezvous folder, with the starts (incarnations) of the servers that it keeps. It
    waits until every `tepo serve` there has acknowledged the lease. From then on a `tepo serve` starts no server, has ended all
    others, and watches the kept servers by connecting to them instead of asking for their health.
    """

    def __init__(self, leases: DeviceLeases, run: str, starts: Callable[[], Sequence[str]], seconds: float) -> None:
        self._leases, self._run, self._starts, self._seconds = leases, run, starts, seconds

    async def reach(self) -> None:
        """Take the lease, and wait until every `tepo serve` has acknowledged it."""
        lease = await asyncio.to_thread(self._leases.take, self._run, self._starts())
        deadline = time.monotonic() + self._seconds
        while missing := await asyncio.to_thread(self._leases.missing, lease):
            if time.monotonic() > deadline:
                files = ", ".join(f"{service}.service" for service in missing)
                raise RolloutError(
                    f"rollout.colocate: {', '.join(missing)} (host and pid of `tepo serve`) did not say within "
                    f"{self._seconds:g} s that the devices are free; look at its log in {self._leases.folder}, and if it "
                    f"was killed, remove {files} there"
                )
            await asyncio.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Release the lease, so that servers may be started again. Does nothing if the lease is not this run's."""
        self._leases.release(self._run)


def service_name(host: str, pid: int) -> str:
    """Return HOST-PID, which identifies a `tepo serve`."""
    return f"{host}-{pid}"


def this_host() -> str:
    """Return the name by which other machines know this one."""
    return socket.gethostname()


def _machine() -> str:
    """Return the id of this PID namespace: process ids are valid on this host, or in this container on it."""
    return os.readlink("/proc/self/ns/pid")
