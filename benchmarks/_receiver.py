"""A process that takes broadcast weights as a server's rank does, and loads nothing: `python -m benchmarks._receiver MODEL`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tepo_megatron.channel import Bucket, Meeting, Source, Taker
from tepo_megatron.rollout.in_server.inbox import Inbox


class Receiver:
    """See `weights.broadcast.GroupReceiver`: one rank, in a process of its own."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "benchmarks._receiver", str(model)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._threads = ThreadPoolExecutor(1)
        self.takers = (Taker("127.0.0.1", 1, self),)

    def begin_update(self, version: int) -> None:
        self._ask("begin", None)

    def join(self, meetings: Mapping[Taker, Meeting]) -> Future[None]:
        return self._threads.submit(self._ask, "join", asdict(meetings[self.takers[0]]))

    def load(self, sources: Sequence[Source]) -> Future[None]:
        buckets = [source.to_json() for source in sources if isinstance(source, Bucket)]
        return self._threads.submit(self._ask, "take", buckets)

    def finish_update(self) -> None:
        self._ask("finish", None)

    def verify(self, sent: Mapping[str, int]) -> None: ...

    def _ask(self, what: str, value: Any) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, value]) + "\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError(f"the receiver could not {what}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._threads.shutdown()


def main() -> None:
    """Do what the lines on the standard input say."""
    inbox = Inbox()
    for line in sys.stdin:
        what, value = json.loads(line)
        if what == "begin":
            inbox.begin(sys.argv[1], tied_embeddings=True)
        elif what == "join":
            inbox.join(Meeting(**value), torch.device("cpu"))
        elif what == "take":
            inbox.take(value)
        else:
            inbox.finish()
        print("done", flush=True)


if __name__ == "__main__":
    main()
