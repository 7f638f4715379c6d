"""Transport `shm` on several machines: a copy of the buckets in the shared memory of each, for servers on all of them.

The machines need not share a file system. Two ranks are on the same machine if they see the same shared memory. On each machine
the lowest rank keeps a folder there. It has the same name everywhere, so that all servers are given one path. A bucket is
broadcast from its sender to one recipient rank on every other machine, over a process group of only these ranks, so each byte
enters each machine once. Senders take different recipients on a machine in turn (round-robin), so that several ranks write at
once.
"""

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.base import scratch
from tepo_megatron.base.errors import CheckpointError, ConfigError, SyncError, TepoError
from tepo_megatron.config import SyncConfig
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.sync import stores
from tepo_megatron.sync.buckets import BucketPlan
from tepo_megatron.wire.bucket_format import Bucket, Source, pack
from tepo_megatron.wire.transport import StagedBucket, WeightReceiver

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # unique to a running kernel


@dataclass(frozen=True)
class RelayRoute:
    """The path of one sender's buckets."""

    sender: int
    recipients: tuple[int, ...]
    group: dist.ProcessGroup | None

    def includes(self, rank: int) -> bool:
        """Return whether this rank sends or receives the buckets."""
        return rank == self.sender or rank in self.recipients


class RelayTransport(stores.StoredTransport):
    """Stores a copy of every bucket as a file on each machine. See `WeightTransport`.

    Collectives: in `open`, three all-gathers over the host group, and the creation of groups; in `stage`, one all-gather
    over the host group, and for each sender with a bucket one broadcast over the sender and its recipients.
    """

    def __init__(self, cfg: SyncConfig, plan: BucketPlan, groups: ParallelDims, receiver: WeightReceiver | None) -> None:
        super().__init__(cfg, plan, receiver)
        self._rank, self._owner, self._device = groups.rank, groups.owner, groups.device
        self._owned: scratch.PrivateFolder | None = None
        self._written: list[tuple[int, Path]] = []  # (number of the round, file) of each file this rank wrote
        self._rows: dict[str, Tensor] = {}
        self._routes: list[RelayRoute] = []
        self.machines: list[list[int]] = []
        self.folder = self._shared_folder = Path()

    @classmethod
    def open(cls, cfg: SyncConfig, plan: BucketPlan, groups: ParallelDims, receiver: WeightReceiver | None) -> "RelayTransport":
        """Return a transport whose folder is made on every machine, and whose routes have their process groups."""
        transport = cls(cfg, plan, groups, receiver)
        with plan.raise_on_all_ranks() as replies:
            replies.mine = memory_identity(stores.SHARED_MEMORY), scratch.new_name(stores.PURPOSE)
        transport.machines = group_by_memory([memory for memory, _ in replies.all])
        transport.folder = stores.SHARED_MEMORY / replies.all[0][1]
        try:
            with plan.raise_on_all_ranks() as replies:
                if groups.rank in (ranks[0] for ranks in transport.machines):
                    transport._owned = _make(transport.folder)
                replies.mine = transport.folder
            transport._shared_folder = replies.all[0]
            with plan.raise_on_all_ranks():
                _check_seen(transport.folder)
        except BaseException:
            transport.close()
            raise
        transport._routes = _routes(plan.senders, transport.machines, groups.limit)
        return transport

    def stage(self, version: int, number: int, tensors: Iterable[tuple[str, Tensor]], checked: bool) -> StagedBucket | None:
        """Write the buckets of all senders on every machine. See `WeightTransport.stage`.

        An error on one rank before anything is sent is raised on all ranks.
        """
        self._remove(before=number - 1)
        own = self._row("own", self._plan.largest)
        name = self.file_name(version, number, self._owner)
        mine: Bucket | None = None
        with self._plan.raise_on_all_ranks() as replies:
            if contents := pack(tensors, own, checked):
                mine = Bucket(number, self._plan.senders.index(self._rank), contents)
                replies.mine = name, mine
        fault: TepoError | None = None  # raised after all buckets are sent: other ranks broadcast with this one
        for route in self._routes:
            if replies.all[route.sender] is None or not route.includes(self._rank):
                continue
            file, bucket = replies.all[route.sender]
            row = own if route.sender == self._rank else self._row("taken", bucket.nbytes)
            row = row[: bucket.nbytes]
            if route.group is not None:
                dist.broadcast(row, src=route.sender, group=route.group)
            try:
                self._write(file, bucket, row)
            except TepoError as e:
                fault = fault or e
        if fault is not None:
            raise fault
        return None if mine is None else StagedBucket(self._shared_folder / name, mine.checksums, mine.nbytes)

    def _write(self, name: str, bucket: Bucket, row: Tensor) -> None:
        self._written.append((bucket.number, self.folder / name))
        try:
            on_host = {name: stores.on_host(tensor) for name, tensor in bucket.tensors(row)}
            stores.write_file(on_host, self.folder / name, bucket.checksums)
        except ValueError as e:
            raise SyncError(f"on {socket.gethostname()}: {e}") from None
        except CheckpointError as e:
            raise CheckpointError(f"on {socket.gethostname()}: {e}") from None

    def _row(self, which: str, nbytes: int) -> Tensor:
        """Return the byte buffer of one use, which is kept during an update."""
        row = self._rows.get(which)
        if row is None or row.numel() < nbytes:
            row = self._rows[which] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return row

    def _remove(self, before: int | None = None) -> None:
        for number, path in self._written:
            if before is None or number < before:
                path.unlink(missing_ok=True)
        self._written = [] if before is None else [(n, path) for n, path in self._written if n >= before]

    def _release(self, sources: Sequence[Source]) -> None:
        """Delete the files on rank 0's machine."""
        for source in sources:
            assert isinstance(source, Path)
            (self.folder / source.name).unlink(missing_ok=True)

    def finish(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._loading = None
        self._remove()
        self._rows = {}

    def close(self) -> None:
        self.abort()
        if self._owned is not None:
            self._owned.remove()


def group_by_memory(memories: Sequence[object]) -> list[list[int]]:
    """Return the groups of ranks that see the same memory, ordered by their lowest rank; `memories` is indexed by rank."""
    machines: dict[object, list[int]] = {}
    for rank, memory in enumerate(memories):
        machines.setdefault(memory, []).append(rank)
    return list(machines.values())


def recipients(machines: Sequence[Sequence[int]], sender: int, turn: int) -> tuple[int, ...]:
    """Return the recipient on every machine but the sender's."""
    return tuple(ranks[turn % len(ranks)] for ranks in machines if sender not in ranks)


def _routes(senders: Sequence[int], machines: Sequence[Sequence[int]], limit: timedelta) -> list[RelayRoute]:
    """Return the routes in the order in which all ranks send and receive, to avoid deadlock. All ranks create all groups."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    routes = []
    for turn, sender in enumerate(senders):
        ends = recipients(machines, sender, turn)
        members = tuple(sorted((sender, *ends)))
        if ends and members not in groups:
            groups[members] = dist.new_group(list(members), timeout=limit)
        routes.append(RelayRoute(sender, ends, groups.get(members)))
    return routes


def memory_identity(root: Path) -> tuple[str, int, int]:
    """Return an identity of a folder in shared memory: equal for those who see the same folder, under whatever path.

    It differs from that of any folder of another machine or container. Raises ConfigError if there is no such folder.
    """
    try:
        boot = _BOOT.read_text()
    except OSError:
        boot = socket.gethostname()
    try:
        status = os.stat(root)
    except OSError as e:
        raise ConfigError(
            f"{root} on {socket.gethostname()}: {e.strerror}; weights for servers of several machines lie there: give the "
            "machine one, or set sync.transport.folder to a folder that all machines share"
        ) from None
    return boot, status.st_dev, status.st_ino


def _make(folder: Path) -> scratch.PrivateFolder:
    try:
        return scratch.PrivateFolder(*scratch.claim(folder.parent, folder.name))
    except OSError as e:
        raise CheckpointError(f"{folder} on {socket.gethostname()}: cannot be made ({e.strerror})") from None


def _check_seen(folder: Path) -> None:
    """Raise ConfigError if this rank does not see the folder that the lowest rank of its machine made."""
    if folder.is_dir():
        return
    raise ConfigError(
        f"{folder} on {socket.gethostname()} is not seen by this rank, though it was taken for that of a rank on the same "
        "machine; set sync.transport.folder to a folder that all machines share"
    )
