"""`tepo serve`: run the servers of a config on this machine for trainers on other machines.

The servers are started, watched and restarted as a trainer's own servers are. Healthy servers are published in the rendezvous
folder. A trainer that is done with a server, or finds it ill, requests a restart of the server there.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tepo_megatron.base.errors import ConfigError, RolloutError
from tepo_megatron.config import RendezvousServerConfig, RolloutConfig
from tepo_megatron.dist.rendezvous_store import is_loopback
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.engines import ENGINES, local_servers
from tepo_megatron.engines.servers.endpoint import ServerConnection
from tepo_megatron.engines.servers.lease import service_name, this_host
from tepo_megatron.engines.servers.local import LocalServer
from tepo_megatron.engines.servers.rendezvous import Rendezvous, ServerRecord, fingerprint
from tepo_megatron.engines.servers.slot import ServerSlot

LOOK_SECONDS = 1.0  # poll interval for the requests of trainers
TURN_SECONDS = 0.2  # poll interval with `rollout.colocate`: trainers wait for each acknowledgement
STEADY_SECONDS = 60.0  # not a limit: uptime after which the failure counters are reset
EVERYWHERE = ("0.0.0.0", "::")


def serve(name: str, cfg: RolloutConfig, launch: LaunchSpec, address: str | None, tell: Callable[[str], None]) -> None:
    """Run the servers until SIGTERM or SIGINT. Returns when no process of the servers is left.

    `address`: address at which other machines reach this one. None: `launch.host`, or this machine's name if that is every
    address.
    """
    if not isinstance(cfg.server, RendezvousServerConfig):
        raise ConfigError(
            "tepo serve starts servers and says in rollout.server.rendezvous where they are; set that to a folder which the "
            "trainer sees, and remove rollout.server.urls"
        )
    address = address or (this_host() if launch.host in EVERYWHERE else launch.host)
    if is_loopback(launch.host):
        tell(f"listening on {launch.host}: trainers of this machine alone can use the servers; give --host for others")
    rendezvous = Rendezvous(Path(cfg.server.rendezvous))
    rendezvous.create()
    asyncio.run(_Service(name, cfg, launch, address, rendezvous, rendezvous.make_key(), tell).run())


class _Service:
    def __init__(
        self,
        name: str,
        cfg: RolloutConfig,
        launch: LaunchSpec,
        address: str,
        rendezvous: Rendezvous,
        key: str,
        tell: Callable[[str], None],
    ) -> None:
        self._name, self._cfg, self._address, self._rendezvous, self._say = name, cfg, address, rendezvous, tell
        log = rendezvous.folder / f"{this_host()}-{os.getpid()}.log"
        apis = [ENGINES[cfg.engine]() for _ in range(cfg.servers)]
        self._servers = local_servers(cfg, apis, launch, log, key)
        self._launch, self._model = launch, fingerprint(launch.model_path)
        self._service, self._acknowledged = service_name(this_host(), os.getpid()), ""
        self._look_seconds = TURN_SECONDS if launch.sleeps else LOOK_SECONDS
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._members = [
            ServerSlot(ServerConnection(server, api, cfg.server), cfg.server, self._changed, tell, self._may_start)
            for server, api in zip(self._servers, apis, strict=True)
        ]
        # server index -> (record, `time.monotonic()` of its publication)
        self._records: dict[int, tuple[ServerRecord, float]] = {}
        self._lost: set[int] = set()
        self._over = asyncio.Event()

    async def run(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._over.set)
        supervisors: list[asyncio.Task[None]] = []
        try:
            self._rendezvous.clear_killed()
            self._rendezvous.leases.register(self._service)
            await self._follow_lease()
            while not self._may_start.is_set() and not await self._over_within(self._look_seconds):
                await self._follow_lease()
            if not self._over.is_set():
                for server in self._servers:
                    server.launch()
                supervisors = [asyncio.create_task(member.supervise()) for member in self._members]
            while not self._over.is_set():
                await self._follow_lease()
                records = list(self._records.items())
                await asyncio.gather(*(self._attend(self._members[i], record, since) for i, (record, since) in records))
                await self._over_within(self._look_seconds)
        finally:
            for supervisor in supervisors:
                supervisor.cancel()
            for i in list(self._records):
                self._rendezvous.withdraw(self._records.pop(i)[0])
            await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self._servers))
            await asyncio.gather(*supervisors, return_exceptions=True)
            for server in self._servers:
                server.forget()
            self._rendezvous.leases.deregister(self._service)
        if len(self._lost) == len(self._members):
            raise RolloutError(str(self._members[0].lost))

    async def _over_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return self._over.is_set()

    async def _follow_lease(self) -> None:
        """Follow the device lease. While a run has it, start nothing and end all servers that the lease does not keep."""
        lease = await asyncio.to_thread(self._rendezvous.leases.current)
        clients = [m.endpoint.client for m in self._members if m.up and m.endpoint.client is not None]
        if lease is None:
            if not self._may_start.is_set():
                self._may_start.set()
                for client in clients:
                    client.resume()
            return
        self._may_start.clear()
        await asyncio.gather(*(client.pause() for client in clients))
        settled = not any(member.draining for member in self._members)
        for i, (record, _) in self._records.items():
            member = self._members[i]
            if record.start in lease.starts:
                continue
            settled = False
            member.delivered()  # not a failure of the server
            if member.incarnation is not None:
                member.incarnation.end(RolloutError(f"{member.endpoint.name} is not of {lease.run}, which has the devices now"))
        if settled and self._acknowledged != lease.token:
            self._rendezvous.leases.acknowledge(self._service, lease.token)
            self._acknowledged = lease.token

    async def _attend(self, member: ServerSlot[ServerConnection], record: ServerRecord, since: float) -> None:
        """Handle one healthy server: reset its failure counters after STEADY_SECONDS, and end it if its user asked for that."""
        why = self._rendezvous.end_reason(record)
        if why is not None or time.monotonic() - since > STEADY_SECONDS:
            member.delivered()  # its restarts so far do not count
        incarnation = member.incarnation
        if why is not None and incarnation is not None:
            error = await member.endpoint.server.failure(f"was given back: {why}")
            if member.endpoint.server.running:  # the log of a healthy server does not explain the end
                error = RolloutError(f"{member.endpoint.name} was given back: {why}")
            incarnation.end(error)

    async def _changed(self) -> None:
        """Publish servers that came up, withdraw those that went down, and report those that were lost."""
        for i, member in enumerate(self._members):
            if member.up and i not in self._records and not self._over.is_set():
                record = self._record(member.endpoint, self._servers[i])
                self._rendezvous.publish(record)
                self._records[i] = (record, time.monotonic())
                self._say(f"{member.endpoint.name} is ready: {record.where}")
            elif not member.up and i in self._records:
                self._rendezvous.withdraw(self._records.pop(i)[0])
            if member.lost is not None and i not in self._lost:
                self._lost.add(i)
                self._say(f"{member.endpoint.name} is lost: {member.lost}")
        if len(self._lost) == len(self._members):
            self._over.set()

    def _record(self, connected: ServerConnection, server: LocalServer) -> ServerRecord:
        assert connected.info is not None and connected.address is not None, "it is up"
        port = connected.address.url.rpartition(":")[2]
        name = f"[{self._address}]" if ":" in self._address else self._address
        return ServerRecord(
            engine=self._cfg.engine,
            engine_version=connected.info.engine_version,
            url=f"http://{name}:{port}",
            run=self._name,
            tp=self._cfg.server.tp,
            model=self._model,
            max_model_len=connected.info.max_model_len,
            precision=self._launch.serves,
            host=this_host(),
            pid=os.getpid(),
            start=secrets.token_hex(8),
            log=str(server.log_path),
            sleeps=self._launch.sleeps,
        )
