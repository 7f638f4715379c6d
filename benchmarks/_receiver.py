"""A process that receives weights as a server's rank does: `python -m benchmarks._receiver MODEL [DEVICE]`.

With a device it copies each tensor there, from a file, from shared memory of the trainer, or from a broadcast. Without one it
loads nothing.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tepo_megatron.wire.broadcast_group import GroupSpec
from tepo_megatron.wire.bucket_format import Bucket, Source
from tepo_megatron.wire.receiver.receiver import RankReceiver
from tepo_megatron.wire.transport import Recipient


class Receiver:
    """Receives weights as one rank in its own process. See `wire.transport.WeightReceiver`."""

    def __init__(self, model: Path, device: str | None = None) -> None:
        command = [sys.executable, "-m", "benchmarks._receiver", str(model), *([device] if device else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._threads = ThreadPoolExecutor(1)
        self.recipients = (Recipient("the receiver", "127.0.0.1", 1, 0),)

    base: int | None = None

    def keep_unchanged(self, names: Sequence[str]) -> None:
        raise AssertionError("nothing is kept of an earlier version")

    def begin_update(self, version: int) -> None:
        self._ask("begin", None)

    def join_groups(self, specs: Mapping[Recipient, GroupSpec]) -> Future[None]:
        return self._threads.submit(self._ask, "join", asdict(specs[self.recipients[0]]))

    def load(self, sources: Sequence[Source]) -> Future[None]:
        serialized = [source.to_json() if isinstance(source, Bucket) else str(source) for source in sources]
        return self._threads.submit(self._ask, "take", serialized)

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
    """Execute the commands on the standard input."""
    receiver, device = RankReceiver(), torch.device(sys.argv[2]) if len(sys.argv) > 2 else None
    if device is not None and device.type == "cuda":
        device = torch.device("cuda", 0)
    for line in sys.stdin:
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # not before the first command: until then others measure the GPU
        what, value = json.loads(line)
        if what == "begin":
            receiver.begin(sys.argv[1], tied_embeddings=True, device=device or torch.device("cpu"))
        elif what == "join":
            receiver.join_groups(GroupSpec(**value), torch.device("cpu"))
        elif what == "take":
            taken = receiver.take(value)
            if device is not None:
                _copy(taken, device)
        else:
            receiver.finish()
        print("done", flush=True)


def _copy(tensors: Iterator[tuple[str, torch.Tensor]] | None, device: torch.device) -> None:
    """Copy each tensor to the device, as an engine that loads it does."""
    for _, tensor in tensors or ():
        tensor.to(device, copy=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
