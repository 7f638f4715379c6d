"""The link between a run and a `tepo serve`: one TCP connection on which both sides prove that they know the servers' key.

The run listens, and its address is in the rendezvous folder; each `tepo serve` connects. Messages are lines of JSON:

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
from collections.abc import Sequence
from typing import Any

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
