"""The links between a run and each `tepo serve`, and the run's end of them: which servers there are, and who has their devices.

A `tepo serve` restarts a dead server whenever it likes, which takes a server's whole memory. So while ranks have the devices
(`hold`), every `tepo serve` starts none, and has ended all that the run does not use. One that is cut off is waited for: it may
not know yet. What it does without its link: `serve.py`.

A link is one TCP connection on which both sides prove that they know the servers' key. The run listens, and its address is in
the rendezvous folder; each `tepo serve` connects. Messages are lines of JSON:

    tepo serve -> run                                    run -> tepo serve
    hello   engine, model, precision, ...                free  servers may be started (this or `hold` comes first)
    up      start, url, ...: a server takes requests     hold  the ranks need the GPUs: start none, end all but those in use
    down    start: it does not any more                  take  start: the run wants to use this server
    taken   start: it will be started again, however     end   start, why: end this start of a server, and start it again
            the link ends
    held    number: of the last `hold`; all is quiet
    note    text: what happened to a server
    bye     all servers have ended

Before them both sides send a random nonce, and then HMAC(key, "run" or "serve", both nonces): the key is never sent, and a
proof is worth nothing on another connection. Later lines have no proof of their own (docs/security.md).

A link ends at once with the process at either end. Where a whole machine vanishes, the other kernel notices that nobody answers
for `seconds` (TCP keepalive). A process that is only stopped keeps its link.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import ConfigError, RolloutError, excerpt
from tepo_megatron.config import RendezvousServerConfig
from tepo_megatron.engines.servers import rendezvous
from tepo_megatron.engines.servers.process import GRACE_SECONDS
from tepo_megatron.engines.servers.rendezvous import make_key

LINE_BYTES = 65536  # a longer line ends the link
# Limit since a connection: its lines take milliseconds; then it is closed, and tried again
GREETING_SECONDS = 10.0


class NotProven(OSError):
    """The other side does not know the servers' key."""


class Link:
    """One end of a link."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
        self._reader, self._writer = reader, writer
        self.peer = str((writer.get_extra_info("peername") or "?")[0])
        tcp, probe = writer.get_extra_info("socket"), max(1, int(seconds / 4))
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {"KEEPIDLE": probe, "KEEPINTVL": probe, "KEEPCNT": 3, "USER_TIMEOUT": int(1000 * seconds)}  # for data: ms
        for name, value in options.items():
            tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)

    def send(self, kind: str, **content: Any) -> None:
        """Send a message. Does nothing if the link is over."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"kind": kind} | content).encode() + b"\n")

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the link is over. A line that is no message ends it."""
        with contextlib.suppress(OSError, ValueError, RecursionError):  # ValueError: too long, no JSON, or the end
            message = json.loads(await self._reader.readline())
            if isinstance(message, dict):
                return message
        self.close()
        return None

    def close(self) -> None:
        """End the link. What was sent still arrives."""
        self._writer.close()

    async def greet(self, key: str, role: str, other: str) -> None:
        """Prove to the other side that this one knows the key, and have it do the same. Raises NotProven."""
        nonce, proof, expected = secrets.token_hex(32), "", "none"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GREETING_SECONDS):
                self.send("nonce", nonce=nonce)
                nonces = sorted([nonce, str((await self.receive() or {}).get("nonce"))])
                self.send("proof", proof=_proof(key, role, nonces))
                proof, expected = str((await self.receive() or {}).get("proof")), _proof(key, other, nonces)
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            self.close()
            raise NotProven(f"{self.peer} does not know the key")


def _proof(key: str, role: str, nonces: list[str]) -> str:
    return hmac.new(key.encode(), json.dumps([role, *nonces]).encode(), "sha256").hexdigest()


async def connect(hosts: Sequence[str], port: int, key: str, seconds: float) -> Link:
    """Connect to the run at the first of its addresses that answers and knows the key. Raises OSError, NotProven first."""
    errors: list[OSError] = []
    for host in hosts:
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES)
            link = Link(reader, writer, seconds)
            await link.greet(key, "serve", "run")
            return link
        except OSError as e:
            errors.append(e)
    raise next((e for e in errors if isinstance(e, NotProven)), errors[0])


POLL_SECONDS = 0.1
MOST_UNPROVEN = 32  # connections that have not proved the key yet


@dataclass(eq=False)
class ConnectedServe:
    """A `tepo serve` that is connected, or was and has not said `bye`."""

    link: Link
    facts: dict[str, Any]  # of its `hello`
    servers: dict[int, "OfferedServer"] = field(default_factory=dict)  # that take requests, by start
    held: int = 0  # number of the last hold that is in force there
    connected: bool = True


@dataclass(eq=False)
class OfferedServer:
    """One start of a server of a `tepo serve`.

    Attributes:
        where: Its address for messages, with its pid, host and log.
        tried: The run uses it, or has refused it.
        taken: Its `tepo serve` knows that the run uses it, and will start it again if the link ends.
    """

    serve: ConnectedServe
    start: int
    url: str
    where: str
    tried: bool = False
    taken: bool = False

    @property
    def up(self) -> bool:
        """Return whether it takes requests, as far as its `tepo serve` has said."""
        return self.serve.servers.get(self.start) is self

    def take(self) -> None:
        """Ask for it, to change its weights; `taken` is the answer."""
        self.serve.link.send("take", start=self.start)

    def end(self, why: str) -> None:
        """Have this start ended, and the server started again. Does nothing if it is down."""
        if self.up:
            del self.serve.servers[self.start]
            self.serve.link.send("end", start=self.start, why=why)


class RunListener:
    """The port at which each `tepo serve` of a rendezvous folder connects. All methods run in the event loop of the fleet.

    `last_note`: what was last reported about a `tepo serve`, for messages.
    """

    def __init__(self, run: Path, cfg: RendezvousServerConfig) -> None:
        self.folder, self.run, self._cfg = Path(cfg.rendezvous), str(run.resolve()), cfg
        self.key = self.last_note = ""
        self._serves: dict[str, ConnectedServe] = {}  # by HOST-PID
        self._links: set[Link] = set()
        self._hold, self._holds, self._unproven = False, 0, 0
        self._listening: tuple[asyncio.Server, rendezvous.RunAddress] | None = None

    async def open(self) -> None:
        """Listen, and publish the address. Raises ConfigError if the folder is not private, or another run uses it."""
        rendezvous.create(self.folder)
        self.key = make_key(self.folder)
        if (other := rendezvous.read_address(self.folder)) is not None:
            with contextlib.suppress(OSError):  # it was killed
                (await connect(other.hosts, other.port, self.key, GREETING_SECONDS)).close()
                raise self._used_by(other.run)
            rendezvous.remove_address(self.folder, other)
        dual = socket.has_dualstack_ipv6()
        door = socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)
        address = rendezvous.RunAddress(self.run, rendezvous.own_addresses(), door.getsockname()[1])
        if not rendezvous.write_address(self.folder, address):
            door.close()
            raise self._used_by("that has just started")
        self._listening = await asyncio.start_server(self._accept, sock=door, limit=LINE_BYTES), address

    def _used_by(self, run: str) -> ConfigError:
        return ConfigError(
            f"rollout.server.rendezvous={self.folder} is used by the run {run}; wait for its end, or use "
            "another folder and another `tepo serve`"
        )

    async def close(self) -> None:
        """End the links. Servers may be started, and those that the run used start again."""
        self.free()
        for link in self._links:
            link.close()
        if self._listening is not None:
            self._listening[0].close()
            rendezvous.remove_address(self.folder, self._listening[1])
        self._listening, self._serves = None, {}

    def servers(self) -> list[OfferedServer]:
        """Return the servers that take requests."""
        return [server for serve in self._serves.values() for server in serve.servers.values()]

    def free(self) -> None:
        """Let servers be started."""
        self._hold = False
        for link in self._links:
            link.send("free")

    async def hold(self) -> None:
        """Return when no `tepo serve` starts servers, and none runs that this run does not use. Raises RolloutError."""
        self._hold, self._holds = True, self._holds + 1
        for link in self._links:
            link.send("hold", number=self._holds)
        # A starting server is ended only once it is up, and a pending health request may take up to heartbeat_timeout.
        seconds = self._cfg.ready_seconds + self._cfg.heartbeat_timeout + 5 * GRACE_SECONDS
        deadline = time.monotonic() + seconds
        while missing := [name for name, serve in self._serves.items() if serve.held != self._holds]:
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"rollout.colocate: {', '.join(missing)} (host and pid of `tepo serve`) did not say within {seconds:g} s "
                    f"that the devices are free; look at its log in {self.folder}, and if it was killed, start it again there"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._unproven == MOST_UNPROVEN:
            writer.close()
            return
        self._unproven += 1
        try:
            link = Link(reader, writer, self._cfg.heartbeat_timeout)
            await link.greet(self.key, "run", "serve")
        except OSError as e:
            self.last_note = f"{e}: on both sides it has to be the one in {self.folder}, or the same TEPO_SERVER_KEY"
            return
        finally:
            self._unproven -= 1
        self._links.add(link)
        try:
            link.send("hold" if self._hold else "free", number=self._holds)
            if (hello := await link.receive()) is not None:  # else another run, which looks whether this one lives
                await self._listen_to(ConnectedServe(link, hello), f"{hello['host']}-{hello['pid']}")
        except (KeyError, TypeError, ValueError) as e:
            self.last_note = f"{link.peer} sent something else than a message ({excerpt(repr(e))}); use one version of `tepo`"
        finally:
            self._links.discard(link)
            link.close()

    async def _listen_to(self, serve: ConnectedServe, name: str) -> None:
        # one of that machine that is cut off was killed, and its servers have ended with it
        others = [(n, s) for n, s in self._serves.items() if s.connected or s.facts["host"] != serve.facts["host"]]
        self._serves = dict([*others, (name, serve)])
        try:
            while (message := await serve.link.receive()) is not None:
                match message["kind"]:
                    case "up":
                        server = OfferedServer(serve, int(message["start"]), str(message["url"]), str(message["where"]))
                        serve.servers[server.start] = server
                    case "down":
                        serve.servers.pop(int(message["start"]), None)
                    case "taken" if (known := serve.servers.get(int(message["start"]))) is not None:
                        known.taken = True
                    case "note":
                        self.last_note = f"{name} said: {excerpt(str(message['text']), 1000)}"
                    case "held":
                        serve.held = int(message["number"])
                    case "bye":
                        self._serves.pop(name, None)
        finally:
            serve.connected = False
            serve.servers.clear()
