"""`tepo serve`: run the servers of a config on this machine for runs on other machines, one run after the other.

The servers are started, watched and restarted as a run's own servers are. Meanwhile this process looks for the address of a run
in the rendezvous folder, connects (`listener.py`), and tells which servers are up. When the link ends, nobody knows the weights
of the servers that the run has used: they are ended and started again, for the next run.

Nobody starts a server while ranks own its GPUs. A `hold` outlives its link, because ranks may outlive their service: nothing is
started until a process of the same run says `free`, or this `tepo serve` is ended by its user. A `tepo serve` that begins asks
the run whose address it finds, before it starts a server.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import ConfigError, RolloutError
from tepo_megatron.config import RendezvousServerConfig, RolloutConfig
from tepo_megatron.dist.rendezvous_store import is_loopback
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.engines import ENGINES, local_servers
from tepo_megatron.engines.servers.endpoint import ServerConnection
from tepo_megatron.engines.servers.listener import Link, connect
from tepo_megatron.engines.servers.rendezvous import create, make_key, read_address
from tepo_megatron.engines.servers.server import fingerprint
from tepo_megatron.engines.servers.slot import Incarnation, PlannedRestart, ServerSlot

LOOK_SECONDS = 0.5  # poll interval for the address of a run
TEXT_LENGTH = 8000  # characters of a note to a run
STEADY_SECONDS = 60.0  # not a limit: uptime after which the failure counters are reset
EVERYWHERE = ("0.0.0.0", "::")


def serve(cfg: RolloutConfig, launch: LaunchSpec, address: str | None, tell: Callable[[str], None]) -> None:
    """Run the servers until SIGTERM or SIGINT. Returns when no process of the servers is left.

    `address`: address at which other machines reach this one. None: `launch.host`, or this machine's name if that is every
    address.
    """
    if not isinstance(cfg.server, RendezvousServerConfig):
        raise ConfigError(
            "tepo serve starts servers for runs that it finds by rollout.server.rendezvous; set that to a folder which the "
            "trainer sees, and remove rollout.server.urls"
        )
    address = address or (socket.gethostname() if launch.host in EVERYWHERE else launch.host)
    if is_loopback(launch.host):
        tell(f"listening on {launch.host}: trainers of this machine alone can use the servers; give --host for others")
    folder = Path(cfg.server.rendezvous)
    create(folder)
    asyncio.run(_Service(cfg, launch, address, folder, make_key(folder), tell).run())


class _Service:
    def __init__(
        self, cfg: RolloutConfig, launch: LaunchSpec, address: str, folder: Path, key: str, tell: Callable[[str], None]
    ) -> None:
        self._cfg, self._address, self._folder, self._key, self._say = cfg, address, folder, key, tell
        self._facts = {
            "engine": cfg.engine,
            "model": fingerprint(launch.model_path),
            "precision": launch.serves,
            "tp": cfg.server.tp,
            "sleeps": launch.sleeps,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        apis = [ENGINES[cfg.engine]() for _ in range(cfg.servers)]
        self._servers = local_servers(cfg, apis, launch, folder / f"{self._facts['host']}-{os.getpid()}.log", key)
        self._may_start, self._over = asyncio.Event(), asyncio.Event()
        self._slots = [
            ServerSlot(ServerConnection(server, api, cfg.server), cfg.server, self._changed, self._note, self._may_start)
            for server, api in zip(self._servers, apis, strict=True)
        ]
        self._up: dict[int, tuple[Incarnation, float]] = {}  # index of a server -> and `time.monotonic()` since when
        self._lost: set[int] = set()
        self._link: Link | None = None
        self._run, self._used = "", set[int]()  # of the link; numbers of incarnations
        self._holder, self._hold = "", 0  # the run that has the devices, and the number of its hold

    async def run(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._over.set)
        following, supervisors = asyncio.create_task(self._follow_runs()), list[asyncio.Task[None]]()
        try:
            while not self._over.is_set():
                if self._may_start.is_set() and not supervisors:
                    for server in self._servers:
                        server.launch()
                    supervisors = [asyncio.create_task(slot.supervise()) for slot in self._slots]
                if following.done():
                    following.result()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), LOOK_SECONDS)
        finally:
            self._over.set()
            for supervisor in supervisors:
                supervisor.cancel()
            await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self._servers))
            await asyncio.gather(*supervisors, return_exceptions=True)
            for server in self._servers:
                server.forget()
            self._send("bye")
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if len(self._lost) == len(self._slots):
            raise RolloutError(str(self._slots[0].lost))

    async def _follow_runs(self) -> None:
        """Serve the run whose address is in the folder, and then the next one."""
        complaint = ""
        while True:
            if (address := await asyncio.to_thread(read_address, self._folder)) is not None:
                try:
                    link = await connect(address.hosts, address.port, self._key, self._cfg.server.heartbeat_timeout)
                    self._run = address.run
                    await self._serve_run(link)
                except (OSError, KeyError, TypeError, ValueError) as e:
                    text = f"the run {address.run} cannot be reached ({e}); if it was killed, the next one is waited for"
                    if text != complaint:
                        self._say(complaint := text)
            if not self._holder:
                self._may_start.set()
            await asyncio.sleep(LOOK_SECONDS)

    async def _serve_run(self, link: Link) -> None:
        """Tell a run of the servers and do what it asks for, until the link ends."""
        self._link, self._used = link, set()
        self._say(f"connected to the run {self._run}")
        self._send("hello", **self._facts)
        for i, (incarnation, _) in self._up.items():
            if not incarnation.ending:
                self._send("up", start=incarnation.number, **self._address_of(i))
        if self._holder not in ("", self._run):
            self._note(f"nothing is started while {self._holder} has the devices; if it was killed, start `tepo serve` again")
        try:
            while (message := await link.receive()) is not None:
                await self._obey(message)
        finally:
            self._link = None
            link.close()
            self._end(True, f"was used by the run {self._run}, whose link has ended")

    async def _obey(self, message: dict[str, Any]) -> None:
        clients = [slot.endpoint.client for slot in self._slots if slot.up and slot.endpoint.client is not None]
        match message["kind"]:
            case "free" if self._holder in ("", self._run):
                self._holder = ""
                self._may_start.set()
                for client in clients:
                    client.resume()
            case "hold":
                self._may_start.clear()
                await asyncio.gather(*(client.pause() for client in clients))
                self._holder, self._hold = self._holder or self._run, int(message["number"])
                self._settle()
            case "take":
                self._used.add(int(message["start"]))
                self._send("taken", start=message["start"])
            case "end":
                for i, (incarnation, _) in list(self._up.items()):
                    if incarnation.number == message["start"]:
                        await self._give_back(self._slots[i], incarnation, f"was given back: {message['why']}")

    async def _give_back(self, slot: ServerSlot[ServerConnection], incarnation: Incarnation, why: str) -> None:
        """End a server that its run found ill."""
        slot.delivered()  # its restarts so far do not count
        error = await slot.endpoint.server.failure(why)
        if slot.endpoint.server.running:  # the log of a healthy server does not explain the end
            error = RolloutError(f"{slot.endpoint.name} {why}")
        incarnation.end(error)

    def _settle(self) -> None:
        """While a run has the devices, end all servers that it does not use; tell it when nothing else runs."""
        if self._holder:
            ending = self._end(False, f"is not of {self._holder}, which has the devices now")
            if not ending and not any(slot.draining for slot in self._slots):
                self._send("held", number=self._hold)

    def _end(self, used: bool, why: str) -> bool:
        """End the healthy servers that the run uses, or all others. Return whether there are any."""
        ending = [(i, incarnation) for i, (incarnation, _) in self._up.items() if (incarnation.number in self._used) == used]
        for i, incarnation in ending:
            incarnation.end(PlannedRestart(f"{self._slots[i].endpoint.name} {why}"))
        return bool(ending)

    async def _changed(self) -> None:
        """Tell of servers that came up, went down or were lost."""
        for i, slot in enumerate(self._slots):
            if slot.incarnation is not None and i not in self._up and not self._over.is_set():
                self._up[i] = slot.incarnation, time.monotonic()
                self._say(f"{slot.endpoint.name} is ready: {self._address_of(i)['where']}")
                self._send("up", start=slot.incarnation.number, **self._address_of(i))
            elif slot.incarnation is None and i in self._up:
                incarnation, since = self._up.pop(i)
                self._send("down", start=incarnation.number)
                if time.monotonic() - since > STEADY_SECONDS:
                    slot.delivered()  # its restarts so far do not count
            if slot.lost is not None and i not in self._lost:
                self._lost.add(i)
                self._note(f"{slot.endpoint.name} is lost: {slot.lost}")
        self._settle()
        if len(self._lost) == len(self._slots):
            self._over.set()

    def _address_of(self, i: int) -> dict[str, str]:
        server, host = self._servers[i], f"[{self._address}]" if ":" in self._address else self._address
        assert server.address is not None, "it is up"
        url = f"http://{host}:{server.address.url.rpartition(':')[2]}"
        return {"url": url, "where": f"{url} (of pid {os.getpid()} on {self._facts['host']}, log {server.log_path})"}

    def _note(self, text: str) -> None:
        """Tell the user here, and the run."""
        self._say(text)
        self._send("note", text=text[:TEXT_LENGTH])

    def _send(self, kind: str, **content: Any) -> None:
        if self._link is not None:
            self._link.send(kind, **content)
