"""The process group over which one rank's weights reach the ranks of all inference servers, and what is said of them over HTTP.

Runs in the trainer and inside the servers, where the default group is another's: it is never touched. Both sides need the same
PyTorch (and NCCL), whose groups speak a language of their own; facts are of PyTorch 2.13.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.ipc import Handle
from tepo_megatron.meeting_store import FolderStore, Store, address_towards, connect
from tepo_megatron.own_peers import own_peers_only

SENDER = 0  # its rank in its group; the servers' ranks come after it
POLL_SECONDS, FORMING_POLL_SECONDS = 0.0005, 0.05


class BrokenChannel(Exception):
    """A member did not come, left, or was too slow; the group is of no use any more."""


@dataclass(frozen=True)
class Meeting:
    """Where new groups are formed, one for each sender, and this server's place in them.

    address, port: of the trainer's store; folder: of that store instead, where all are on one machine; name: of this meeting
    alone; senders, ranks: groups, and ranks in each; first: the rank of the server's first process; seconds: for a bucket to
    arrive; join_seconds: for all groups to be formed.
    """

    address: str
    port: int
    name: str
    senders: int
    ranks: int
    first: int
    seconds: float
    join_seconds: float
    folder: str = ""

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


Source = Path | Bucket  # of weights: a safetensors file that both sides see, or what a rank of the trainer broadcasts or lends


@dataclass(frozen=True)
class Kept:
    """What an update to `version` leaves as it is in version `base`: tensors by their Hugging Face names."""

    version: int
    base: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Taker:
    """A server in an update: its name, host, number of ranks, and what tells it from the one that it was before a restart."""

    name: str
    host: str
    ranks: int
    life: object


class Channel:
    """One rank's end of a sender's group."""

    def __init__(
        self,
        meeting: Meeting,
        sender: int,
        rank: int,
        device: torch.device,
        until: float | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Form the group and broadcast one byte in it.

        NCCL connects the members in their first collective, in a call that nothing ends when a member is missing. So a thread
        makes that call. When it is late, the thread is left behind, and the group is never used.

        Args:
            meeting, sender, rank, device: where the members meet, number of the group, this rank in it, its device.
            until: deadline by `time.monotonic()`; None: `meeting.join_seconds` from now.
            wanted: polled; once it is False, forming the group is given up.

        Raises:
            BrokenChannel: a member left, the group was late, or was not wanted any more.
        """
        self._seconds, self._device = meeting.seconds, device
        self._group: Any = None
        self._work: Any = None
        self._failed, self._until = "", 0.0
        self._given_up = threading.Event()
        until = time.monotonic() + meeting.join_seconds if until is None else until
        forming = threading.Thread(target=self._form, args=(meeting, sender, rank), name="form group", daemon=True)
        forming.start()
        try:
            while forming.is_alive() and time.monotonic() < until and wanted():
                forming.join(FORMING_POLL_SECONDS)
        finally:
            if forming.is_alive():
                self._given_up.set()
        if self._given_up.is_set():
            raise BrokenChannel(f"group {sender} was called off, or not formed within {meeting.join_seconds:g} s")
        if self._failed:
            raise BrokenChannel(self._failed)

    def _form(self, meeting: Meeting, sender: int, rank: int) -> None:
        """Form the group and broadcast one byte in it, over a connection to the store that nobody else waits for."""
        group: Any = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        try:
            group = form_group(meeting, sender, rank, self._device)
            work = group.broadcast([torch.zeros(1, dtype=torch.uint8, device=self._device)], _from_sender(meeting.join_seconds))
            while not work.is_completed() and not self._given_up.is_set():
                time.sleep(POLL_SECONDS)
            if not self._given_up.is_set():
                work.wait()
                self._group = group
        except (RuntimeError, OSError, BrokenChannel) as e:
            self._failed = _first_line(e)
        if group is not None and self._device.type == "cuda" and (self._failed or self._given_up.is_set()):
            group.abort()

    def start(self, row: Tensor) -> None:
        """Begin to send the row, or to receive into it: uint8, contiguous, on the group's device. Returns at once.

        Collectives: one broadcast.
        """
        self._until = time.monotonic() + self._seconds
        try:
            self._work = self._group.broadcast([row], _from_sender(self._seconds))
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


def join_store(meeting: Meeting) -> FolderStore | dist.TCPStore:
    """The meeting's store. Raises BrokenChannel when it cannot be reached, or others could write in it."""
    try:
        if meeting.folder:
            return FolderStore(Path(meeting.folder))
        return connect(meeting.address, meeting.port, meeting.join_seconds)
    except (RuntimeError, OSError) as e:
        raise BrokenChannel(_first_line(e)) from None


def came_key(meeting: Meeting, rank: int) -> str:
    """What a server's rank puts into the store when it begins to form the groups."""
    return f"{meeting.name}/came/{rank}"


def off_key(meeting: Meeting) -> str:
    """What rank 0 puts into the store when the groups are not wanted any more."""
    return f"{meeting.name}/off"


def joined_key(meeting: Meeting, rank: int) -> str:
    """What a server's rank puts into the store once it is in all groups."""
    return f"{meeting.name}/joined/{rank}"


def arrived_key(meeting: Meeting, number: int, rank: int) -> str:
    """What a server's rank puts into the store once it has the round `number` of an update."""
    return f"{meeting.name}/arrived/{number}/{rank}"


def tell(store: Store, key: str) -> None:
    """Put a key into a store, where all see it once this has returned. Raises BrokenChannel.

    `set` would not do: it is not answered, so that what another hears by another way (an answer of HTTP) may overtake it.
    """
    try:
        store.add(key, 1)
    except (RuntimeError, OSError) as e:
        raise BrokenChannel(_first_line(e)) from None


def crc32(tensor: Tensor) -> int:
    """Of a tensor's bytes."""
    return zlib.crc32(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()))


def _from_sender(seconds: float) -> Any:
    """Options of a broadcast from the sender, which gloo gives up after `seconds`."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = SENDER, 0, datetime.timedelta(seconds=seconds)
    return options


def form_group(meeting: Meeting, sender: int, rank: int, device: torch.device) -> Any:
    """NCCL for GPUs, else gloo, over the interface that leads to the trainer; with gloo all members are connected then.
    Raises BrokenChannel, RuntimeError and OSError; on one machine also where another user is in it (`own_peers.Stranger`)."""
    timeout = datetime.timedelta(seconds=meeting.join_seconds)
    joined, name = join_store(meeting), f"{meeting.name}/{sender}"
    store = joined.of_group(name) if isinstance(joined, FolderStore) else dist.PrefixStore(name, joined)
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
    with own_peers_only() if meeting.folder else contextlib.nullcontext():
        return ProcessGroupGloo(store, rank, meeting.ranks, gloo)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0][:300]
