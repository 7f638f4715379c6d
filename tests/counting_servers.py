"""HTTP servers in a thread that answer like vLLM and count connections and requests."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator

from tepo_megatron.base.loop import LoopThread


class CountingServer:
    """One server. All methods but `stop` run in the thread's event loop.

    Attributes:
        opened: Number of connections so far.
        open, most_open: Number of open connections now, and the largest so far.
        requests: Number of requests by path.
        seconds: Seconds that an answer takes.
        largest: Bytes of the largest request, and of the largest answer.
        drops: Paths whose requests are not answered: the connection is closed instead.
        drops_reused: Close a connection at its second request, as if it had been idle for too long.
    """

    def __init__(self, loop: LoopThread | None = None) -> None:
        self._loop = loop
        self._writers: set[asyncio.StreamWriter] = set()
        self.opened = self.most_open = 0
        self.requests: Counter[str] = Counter()
        self.largest = {"request": 0, "answer": 0}
        self.seconds, self.drops, self.drops_reused = 0.0, set[str](), False

    @property
    def open(self) -> int:
        return len(self._writers)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = await asyncio.start_server(self.connected, host, port, backlog=1024)
        self.url = f"http://{host}:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """End the server: it closes all connections and takes no more."""
        self._loop.run(self.end())

    async def end(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.opened, self.most_open = self.opened + 1, max(self.most_open, self.open)
        answered = 0
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                    path = head.split()[1].partition("?")[0]
                    length = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
                    body = json.loads(await reader.readexactly(length)) if length else {}
                    self.requests[path] += 1
                    if path in self.drops or (self.drops_reused and answered):
                        return
                    kind, data = await self.respond(path, body)
                    self.note("request", length)
                    self.note("answer", len(data))
                    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode())
                    writer.write(data)
                    await writer.drain()
                    answered += 1
        finally:
            self._writers.discard(writer)
            writer.close()

    def note(self, what: str, nbytes: int) -> None:
        self.largest[what] = max(self.largest[what], nbytes)

    async def respond(self, path: str, body: dict) -> tuple[str, bytes]:
        """Return the content type and the content of an answer."""
        await asyncio.sleep(self.seconds)
        return "application/json", json.dumps(self.answer(path, body)).encode()

    def answer(self, path: str, body: dict) -> object:
        if path != "/v1/completions":
            others = {"/version": {"version": "0"}, "/v1/models": {"data": [{"max_model_len": 4096}]}}
            return others.get(path, {"weight_version": "default"})
        choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
        choice |= {"prompt_token_ids": body["prompt"]}
        return {"choices": [choice | {"index": i} for i in range(body["n"])]}


@contextlib.contextmanager
def serving(count: int) -> Iterator[list[CountingServer]]:
    loop = LoopThread("counting servers")
    servers = [CountingServer(loop) for _ in range(count)]
    try:
        for server in servers:
            loop.run(server.start())
        yield servers
    finally:
        for server in servers:
            server.stop()
        loop.stop()
