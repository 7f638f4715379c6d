"""The process group over which one rank's weights reach the ranks of all inference servers, and what is said of them over HTTP.

Runs in the trainer and inside the servers, where the default group is another's: it is never touched. Both sides need the same
PyTorch (and NCCL), whose groups speak a language of their own; facts are of PyTorch 2.13.
"""

from __future__ import annotations

import datetime
import json
import math
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.ipc import Handle

SENDER = 0  # its rank in its group; the servers' ranks come after it
POLL_SECONDS = 0.0005


class BrokenChannel(Exception):
    """A member did not come, left, or was too slow; the group is of no use any more."""


@dataclass(frozen=True)
class Meeting:
    """Where new groups are formed, one for each sender, and this server's place in them.

    address, port: of the trainer's store; name: of this meeting alone; senders, ranks: groups, and ranks in each; first: the
    rank of the server's first process; seconds: for the members to come, and then for a bucket to arrive.
    """

    address: str
    port: int
    name: str
    senders: int
    ranks: int
    first: int
    seconds: float

    def at(self, first: int) -> Meeting:
        """The same, for another server."""
        return replace(self, first=first)


@dataclass(frozen=True)
class Content:
    """One tensor of a bucket; crc32: of its bytes, None if it need not be checked."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as in `torch`
    crc32: int | None = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * _dtype(self.dtype).itemsize

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError if it was damaged on its way."""
        if self.crc32 is not None and crc32(tensor) != self.crc32:
            raise ValueError(f"tensor {self.name} was damaged on its way: its CRC-32 is not that of the sender")


@dataclass(frozen=True)
class Bucket:
    """Tensors of a sender as one row of bytes, one after the other, each at a multiple of its dtype's size (see `pack`).

    number: of the round in its update, from 0; sender: its number, which is that of its group; handle: where the row lies;
    None: it is broadcast.
    """

    number: int
    sender: int
    contents: tuple[Content, ...]
    handle: Handle | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the row."""
        return _places(self.contents)[-1]

    def to_json(self) -> str:
        """For `from_json`; no file's path looks like it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Bucket:
        """What `to_json` wrote."""
        read = json.loads(text)
        contents = tuple(Content(c["name"], tuple(c["shape"]), c["dtype"], c["crc32"]) for c in read["contents"])
        handle = None if read["handle"] is None else Handle(**read["handle"])
        return cls(read["number"], read["sender"], contents, handle)

    def tensors(self, row: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view of the uint8 row) of each tensor. Raises ValueError for one that was damaged."""
        for content, start in zip(self.contents, _places(self.contents), strict=False):
            tensor = row[start : start + content.nbytes].view(_dtype(content.dtype)).view(content.shape)
            content.check(tensor)
            yield content.name, tensor


def pack(tensors: Iterable[tuple[str, Tensor]], row: Tensor, with_checksums: bool) -> tuple[Content, ...]:
    """Copy tensors into a row (uint8, on any device) as a `Bucket` holds them; the widest dtypes first, it has no gaps."""
    contents: list[Content] = []
    end = 0
    for name, tensor in tensors:
        start = _aligned(end, tensor.dtype)
        end = start + tensor.nbytes
        row[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        checksum = crc32(tensor) if with_checksums else None
        contents.append(Content(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksum))
    return tuple(contents)


def _places(contents: Sequence[Content]) -> list[int]:
    """Where each begins in its row, and where the last one ends."""
    places, end = [], 0
    for content in contents:
        places.append(_aligned(end, _dtype(content.dtype)))
        end = places[-1] + content.nbytes
    return [*places, end]


def _aligned(end: int, dtype: torch.dtype) -> int:
    return -(-end // dtype.itemsize) * dtype.itemsize


# of weights: a safetensors file that both sides see, or what a rank of the trainer broadcasts or lends
Source = Path | Bucket


@dataclass(frozen=True)
class Kept:
    """What an update to `version` leaves as it is in version `base`: tensors by their Hugging Face names."""

    version: int
    base: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Taker:
    """A server in an update: where it runs, its ranks, and what tells it from the one that it was before a restart."""

    host: str
    ranks: int
    life: object


class Channel:
    """One rank's end of a sender's group."""

    def __init__(self, store: dist.Store, meeting: Meeting, sender: int, rank: int, device: torch.device) -> None:
        """Meet the others. Raises BrokenChannel when they do not come in time."""
        self._seconds, self._device = meeting.seconds, device
        self._work: Any = None
        self._failed = ""
        self._until = 0.0
        try:
            self._group = _group(dist.PrefixStore(f"{meeting.name}/{sender}", store), meeting, rank, device)
        except (RuntimeError, OSError) as e:
            raise BrokenChannel(_first_line(e)) from None

    def start(self, row: Tensor) -> None:
        """Begin to send the row, or to receive into it: uint8, contiguous, on the group's device. Returns at once.

        Collectives: one broadcast.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        self._until = time.monotonic() + self._seconds
        try:
            self._work = self._group.broadcast([row], options)
        except RuntimeError as e:
            self._failed = _first_line(e)

    def wait(self) -> None:
        """Return when all that was started is over. Raises BrokenChannel.

        It asks instead of waiting: a wait for NCCL ends when the stream has the work, or never.
        """
        work, self._work = self._work, None
        if self._failed:
            raise BrokenChannel(self._failed)
        try:
            while work is not None and not work.is_completed():
                if time.monotonic() > self._until + self._seconds:  # gloo notices after `seconds` itself
                    raise BrokenChannel(f"not over after {2 * self._seconds:g} s")
                time.sleep(POLL_SECONDS)
            if work is not None:
                work.wait()
        except RuntimeError as e:
            raise BrokenChannel(_first_line(e)) from None

    def close(self) -> None:
        """Leave the group: members who wait for this one fail at once."""
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()
        self._group = self._work = None


def open_store(address: str) -> dist.TCPStore:
    """A store on this machine's interface with `address`, and on no other, at a port that was free."""
    door = socket.create_server((address, 0))
    port = door.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())


def join_store(meeting: Meeting) -> dist.Store:
    """The meeting's store. Raises BrokenChannel when it cannot be reached."""
    try:
        timeout = datetime.timedelta(seconds=meeting.seconds)
        return dist.TCPStore(meeting.address, meeting.port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as e:
        raise BrokenChannel(_first_line(e)) from None


def joined_key(meeting: Meeting, rank: int) -> str:
    """What a server's rank puts into the store once it is in all groups."""
    return f"{meeting.name}/joined/{rank}"


def arrived_key(meeting: Meeting, number: int, rank: int) -> str:
    """What a server's rank puts into the store once it has the round `number` of an update."""
    return f"{meeting.name}/arrived/{number}/{rank}"


def tell(store: dist.Store, key: str) -> None:
    """Put a key into a store, where all see it once this has returned. Raises BrokenChannel.

    `set` would not do: it is not answered, so that what another hears by another way (an answer of HTTP) may overtake it.
    """
    try:
        store.add(key, 1)
    except RuntimeError as e:
        raise BrokenChannel(_first_line(e)) from None


def address_towards(host: str) -> str:
    """This machine's address on the way to another, or to itself. Sends nothing. Raises OSError for an unknown host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def crc32(tensor: Tensor) -> int:
    """Of a tensor's bytes."""
    return zlib.crc32(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()))


def _group(store: dist.Store, meeting: Meeting, rank: int, device: torch.device) -> Any:
    """NCCL for GPUs, else gloo, over the interface that leads to the trainer; with gloo all members are connected then."""
    timeout = datetime.timedelta(seconds=meeting.seconds)
    store.set_timeout(timeout)
    if device.type == "cuda":
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = datetime.timedelta(days=1)  # its watchdog ends the process; `wait` and `close` end the group before
        return ProcessGroupNCCL(store, rank, meeting.ranks, nccl)
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    gloo = ProcessGroupGloo._Options()
    gloo._devices = [ProcessGroupGloo.create_device(hostname=address_towards(meeting.address))]
    gloo._timeout, gloo._threads = timeout, 1
    return ProcessGroupGloo(store, rank, meeting.ranks, gloo)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0][:300]
