"""A small inference server of our own, a real process behind real HTTP, that fails on request. The fleet is tested with it.

    python -m tests.scripted_server PORT HOST [RANKS MODEL]

Its samples depend on (prompt, seed) alone. It keeps the ids of the groups that it delivered in full. With the last two
arguments it takes weights of that model by broadcast too, with RANKS ranks, each a thread of its own with a real inbox; only
then it imports torch, which takes seconds.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

KEY = "TEPO_SCRIPTED_KEY"


class Handler(BaseHTTPRequestHandler):
    """The server's state and its HTTP handler.

    Attributes:
        behaviour: Scripted faults:
            errors: Number of the next answers with status 500.
            slow: Seconds that an answer takes.
            loading: Seconds that a load takes.
            refuse, die: Fault in the next update or change of sleep; `at` selects its request.
            broadcast: Fault of the first rank in the next round: `die` or `freeze` before it, die in the `midst` of it.
            save: Folder in which its ranks save what an update brought.
            checksums: Its answer to a request for checksums.
            grow: MiB of memory that it holds from now on.
        loaded: Names of the files of the last update.
        kept: Names of the tensors that the last update left out.
        asleep: Parts that are released. Like SGLang, it dies of a second release, or of a release while it samples.
    """

    ranks: ClassVar[list[Any]] = []

    version = -1  # as `engine.INITIAL_VERSION`
    loading: ClassVar[Any] = None  # file names during an update
    loaded: ClassVar[Any] = None
    kept: ClassVar[Any] = None
    asleep: ClassVar[list[str]] = []
    sampling: ClassVar[int] = 0
    hoard: ClassVar[bytearray] = bytearray()
    behaviour: ClassVar[dict[str, Any]] = {}
    interruptions = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/about" and self.headers.get("Authorization") != f"Bearer {os.environ[KEY]}":
            return self.answer(401, {"message": "no key"})
        self.answer(200, {"version": Handler.version, "loaded": Handler.loaded, "kept": Handler.kept, "asleep": Handler.asleep})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {os.environ[KEY]}":
            return self.answer(401, {"message": "no key"})
        if self.path == "/behave":
            Handler.behaviour = body
            if "version" in body:
                Handler.version = body["version"]
            Handler.hoard += b"\1" * (body.get("grow", 0) * 2**20)
            return self.answer(200, {})
        if self.path == "/join":
            return self.join_groups(body)
        if self.path in ("/sleep", "/wake/weights", "/wake/kv_cache"):
            return self.rest()
        if self.path == "/keep":
            Handler.kept = body
            for rank in Handler.ranks:
                rank.keep_unchanged(body)
            return self.fails("cannot keep these") or self.answer(200, {})
        if self.path in ("/begin", "/load", "/update"):
            return self.update(body)
        if self.path == "/checksums":
            return self.fails("cannot tell") or self.answer(200, Handler.behaviour.get("checksums"))
        if self.path == "/interrupt":
            Handler.interruptions += 1
            return self.answer(200, {})
        with Handler.lock:
            errors = Handler.behaviour.get("errors", 0)
            Handler.behaviour["errors"] = max(0, errors - 1)
        if errors:
            return self.answer(500, {"message": "out of order"})
        if body["max_tokens"] > 100:
            return self.answer(400, {"message": "max_tokens is too large"})
        chance = random.Random(f"{body['seed']}/{body['prompt']}")
        samples = [[chance.randrange(3, 60) for _ in range(body["max_tokens"])] for _ in range(body["samples"])]
        with Handler.lock:
            Handler.sampling += 1
        there = self.sampled(body["max_tokens"])
        with Handler.lock:
            Handler.sampling -= 1
        if Handler.asleep:
            os._exit(4)
        answer = {"samples": [sample[:there] for sample in samples], "version": Handler.version}
        return self.answer(200, answer | {"stop_reason": "length" if there == body["max_tokens"] else "abort"})

    def sampled(self, tokens: int) -> int:
        """Return the number of tokens at the end of the sample, or when an interruption comes."""
        before, pause = Handler.interruptions, Handler.behaviour.get("slow", 0.0) / tokens
        for there in range(tokens):
            if Handler.interruptions > before:
                return there
            time.sleep(pause)
        return tokens

    def rest(self) -> None:
        if self.fails("cannot do that"):
            return
        part = self.path.rpartition("/")[2]
        if Handler.sampling or (part == "sleep") == bool(Handler.asleep) or (part != "sleep" and part != Handler.asleep[0]):
            os._exit(4)
        Handler.asleep = ["weights", "kv_cache"] if part == "sleep" else Handler.asleep[1:]
        self.answer(200, {})

    def fails(self, why: str) -> bool:
        """Return whether a scripted fault refuses this request; die if the fault says so."""
        if self.path == Handler.behaviour.get("at", "/update"):
            if Handler.behaviour.pop("refuse", False):
                self.answer(500, {"message": why})
                return True
            if Handler.behaviour.pop("die", False):
                os._exit(3)
        return False

    def update(self, body: dict[str, Any]) -> None:
        """Begin, load or finish an update; refuse a request that is out of order."""
        if self.fails("cannot load these"):
            return
        if Handler.asleep[:1] == ["weights"]:
            os._exit(4)
        if self.path == "/begin" and body["broken_off"]:
            Handler.loading = None
        if (Handler.loading is None) != (self.path == "/begin"):
            return self.answer(500, {"message": "out of turn"})
        if self.path == "/begin":
            Handler.loading, Handler.kept = [], None
            for rank in Handler.ranks:
                rank.begin()
        elif self.path == "/load":
            time.sleep(Handler.behaviour.get("loading", 0.0))
            Handler.loading += body["files"]
            self.on_all_ranks(lambda rank: rank.load(body["buckets"]) if body["buckets"] else None)
        else:
            self.on_all_ranks(lambda rank: rank.finish(Handler.behaviour.get("save")))
            Handler.version, Handler.loaded, Handler.loading = body["version"], Handler.loading, None
        return self.answer(200, {})

    def join_groups(self, body: dict[str, Any]) -> None:
        """Let each rank join its group."""
        from tepo_megatron.wire.broadcast_group import GroupSpec

        for rank in Handler.ranks:
            rank.spec = GroupSpec(**body)
        self.on_all_ranks(lambda rank: rank.join_groups())
        return self.answer(200, {})

    def on_all_ranks(self, do: Callable[[Any], None]) -> None:
        with ThreadPoolExecutor(max(1, len(Handler.ranks))) as threads:
            list(threads.map(do, Handler.ranks))

    def answer(self, status: int, content: Any) -> None:
        """Send a JSON answer."""
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Rank:
    """One rank of the server, and the tensors of its last update."""

    def __init__(self, model: str, number: int) -> None:
        import torch

        from tepo_megatron.wire.receiver.receiver import RankReceiver

        self.model, self.number, self.device = model, number, torch.device("cpu")
        self.inbox, self.tensors, self.spec = RankReceiver(), {}, None

    def begin(self) -> None:
        self.inbox.begin(self.model, tied_embeddings=True)
        self.tensors = {}

    def keep_unchanged(self, body: dict[str, Any]) -> None:
        from tepo_megatron.wire.broadcast_group import UnchangedTensors

        self.inbox.keep_unchanged(UnchangedTensors(**body))

    def join_groups(self) -> None:
        self.inbox.join_groups(self.spec, self.device, self.number)

    def load(self, buckets: list[str]) -> None:
        fault = Handler.behaviour.pop("broadcast", None) if self.number == 0 else None
        if fault == "die":
            os._exit(3)
        if fault == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "midst":
            self.leave_in_the_midst(buckets[0])
        arrived = self.inbox.take(buckets)
        if arrived is not None:
            self.tensors |= {name: tensor.clone() for name, tensor in arrived}

    def leave_in_the_midst(self, text: str) -> None:
        import torch

        from tepo_megatron.wire.bucket_format import Bucket

        bucket = Bucket.from_json(text)
        row = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        self.inbox.membership.groups[bucket.sender].start(row)
        while not row.any():
            time.sleep(0)
        os._exit(3)

    def finish(self, folder: str | None) -> None:
        from safetensors.torch import save_file

        if self.tensors or self.inbox.unchanged:
            self.inbox.finish()
        if folder is not None:
            save_file(self.tensors, Path(folder) / f"{os.getpid()}-{self.number}.safetensors")


if __name__ == "__main__":
    time.sleep(float(os.environ.get("TEPO_SCRIPTED_START_SECONDS", "0")))
    if len(sys.argv) > 3:
        Handler.ranks = [Rank(sys.argv[4], number) for number in range(int(sys.argv[3]))]
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer((sys.argv[2], int(sys.argv[1])), Handler).serve_forever()
