"""HTTP servers in a thread that answer like vLLM and count connections and requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator

from tepo_megatron.utils.loop import LoopThread


class CountingServer:
    """One server. All methods but `stop` run in the thread's event loop.

    Attributes:
        opened: Number of connections so far.
        open, most_open: Number of open connections now, and the largest so far.
        requests: Number of requests by path.
        seconds: Seconds that an answer takes.
        drops: Paths whose requests are not answered: the connection is closed instead.
        drops_reused: Close a connection at its second request, as if it had been idle for too long.
    """

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._writers: set[asyncio.StreamWriter] = set()
        self.opened = self.most_open = 0
        self.requests: Counter[str] = Counter()
        self.seconds, self.drops, self.drops_reused = 0.0, set[str](), False

    @property
    def open(self) -> int:
        return len(self._writers)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self.connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

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
                    await asyncio.sleep(self.seconds)
                    data = json.dumps(self.answer(path, body)).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data))
                    writer.write(data)
                    await writer.drain()
                    answered += 1
        finally:
            self._writers.discard(writer)
            writer.close()

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
