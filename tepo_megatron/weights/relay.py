"""Buckets as files in the shared memory of each machine, one copy in each, sent between the ranks: for servers on all machines
of the ranks, which share no file system.

A machine is whoever sees the same shared memory. On each the lowest rank keeps a folder there, by the same name everywhere, so
that all servers are told one path. A bucket goes from its sender to one rank of every other machine, over a group of these
alone: each byte enters each machine once. Which rank takes it goes round with the sender, so that several write at once.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron import scratch
from tepo_megatron.channel import Bucket, Source, pack
from tepo_megatron.config import SyncConfig
from tepo_megatron.errors import CheckpointError, ConfigError, SyncError, TepoError
from tepo_megatron.parallel import Groups
from tepo_megatron.weights import stores
from tepo_megatron.weights.rounds import Rounds
from tepo_megatron.weights.stores import Stored

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # of a running kernel, no other has it


@dataclass(frozen=True)
class Route:
    """Of a sender's buckets. takers: one rank of every machine but its own; group: of all these, None where there are none."""

    sender: int
    takers: tuple[int, ...]
    group: dist.ProcessGroup | None

    def passes(self, rank: int) -> bool:
        """Whether this rank sends or takes them."""
        return rank == self.sender or rank in self.takers


class Relay:
    """See `stores.Store`. machines: their ranks; folder: on this machine.

    Collectives: here, three all-gathers over the host group, and new groups; in a put one all-gather over the host group, and
    for each sender with a bucket one broadcast over it and its takers.
    """

    def __init__(self, cfg: SyncConfig, plan: Rounds, groups: Groups) -> None:
        self._plan, self._rank, self._owner, self._device = plan, groups.rank, groups.owner, groups.device
        self._in_use: int | None = None
        self._written: list[tuple[int, Path]] = []  # with the number of its round
        self._rows: dict[str, Tensor] = {}
        with plan.agreed() as said:
            said.mine = _memory(stores.SHARED_MEMORY), scratch.new_name(stores.PURPOSE)
        self.machines = together([memory for memory, _ in said.all])
        self.folder = stores.SHARED_MEMORY / said.all[0][1]
        try:
            with plan.agreed() as said:
                if groups.rank in (ranks[0] for ranks in self.machines):
                    self._in_use = _make(self.folder)
                said.mine = self.folder
            self._told: Path = said.all[0]
            with plan.agreed():
                _check_seen(self.folder)
        except BaseException:
            self.close()
            raise
        self._routes = _routes(plan.senders, self.machines)

    def put(self, version: int, number: int, tensors: Iterable[tuple[str, Tensor]], checked: bool) -> Stored | None:
        """See `Store.put`. On all ranks it raises what one of them was refused before anything was sent."""
        self._remove(before=number - 1)
        own = self._row("own", self._plan.largest)
        name = f"v{version}-{number:05d}-{self._owner}.safetensors"
        with self._plan.agreed() as said:
            contents = pack(tensors, own, checked)
            if contents:
                said.mine = name, Bucket(number, self._plan.senders.index(self._rank), contents)
        fault: TepoError | None = None  # told once all is sent: others send and take with this rank
        for route in self._routes:
            if said.all[route.sender] is None or not route.passes(self._rank):
                continue
            file, bucket = said.all[route.sender]
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
        return (self._told / name, {c.name: c.crc32 for c in contents if c.crc32 is not None}) if contents else None

    def _write(self, name: str, bucket: Bucket, row: Tensor) -> None:
        """Raises CheckpointError, and SyncError for a tensor that was damaged on its way."""
        self._written.append((bucket.number, self.folder / name))
        checksums = {c.name: c.crc32 for c in bucket.contents if c.crc32 is not None}
        try:
            there = {name: stores.on_host(tensor) for name, tensor in bucket.tensors(row)}
            stores.write_file(there, self.folder / name, checksums)
        except ValueError as e:
            raise SyncError(f"on {socket.gethostname()}: {e}") from None
        except CheckpointError as e:
            raise CheckpointError(f"on {socket.gethostname()}: {e}") from None

    def _row(self, which: str, nbytes: int) -> Tensor:
        """One for each use, during an update."""
        row = self._rows.get(which)
        if row is None or row.numel() < nbytes:
            row = self._rows[which] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return row

    def _remove(self, before: int | None = None) -> None:
        """What this rank wrote: of the rounds before that one, or all."""
        for number, path in self._written:
            if before is None or number < before:
                path.unlink(missing_ok=True)
        self._written = [] if before is None else [(n, path) for n, path in self._written if n >= before]

    def remove(self, sources: Sequence[Source]) -> None:
        """From rank 0's machine; from another, whoever wrote them does, before the round after the next or in the end."""
        for source in sources:
            assert isinstance(source, Path)
            (self.folder / source.name).unlink(missing_ok=True)

    def rest(self) -> None:
        """See `clear`."""
        self.clear()

    def clear(self) -> None:
        """Remove this rank's files, and give the rows back."""
        self._remove()
        self._rows = {}

    def close(self) -> None:
        """Remove the folder, on the rank that keeps it."""
        self.clear()
        if self._in_use is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._in_use)
            self._in_use = None


def together(memories: Sequence[object]) -> list[list[int]]:
    """The ranks that see the same memory, by their lowest; memories: by rank."""
    machines: dict[object, list[int]] = {}
    for rank, memory in enumerate(memories):
        machines.setdefault(memory, []).append(rank)
    return list(machines.values())


def takers(machines: Sequence[Sequence[int]], sender: int, turn: int) -> tuple[int, ...]:
    """On every machine but the sender's, the rank whose turn it is."""
    return tuple(ranks[turn % len(ranks)] for ranks in machines if sender not in ranks)


def _routes(senders: Sequence[int], machines: Sequence[Sequence[int]]) -> list[Route]:
    """In the order in which everybody sends and takes, so that nobody waits for who waits for it. All ranks make all groups."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    routes = []
    for turn, sender in enumerate(senders):
        ends = takers(machines, sender, turn)
        members = tuple(sorted((sender, *ends)))
        if ends and members not in groups:
            groups[members] = dist.new_group(list(members))
        routes.append(Route(sender, ends, groups.get(members)))
    return routes


def _memory(root: Path) -> tuple[str, int, int]:
    """What tells a folder from that of any other machine or container. Raises ConfigError."""
    try:
        boot = _BOOT.read_text()
    except OSError:
        boot = socket.gethostname()
    try:
        found = os.stat(root)
    except OSError as e:
        raise ConfigError(
            f"{root} on {socket.gethostname()}: {e.strerror}; weights for servers of several machines lie there: give the "
            "machine one, or set sync.folder to a folder that all machines share"
        ) from None
    return boot, found.st_dev, found.st_ino


def _make(folder: Path) -> int:
    """Make it; the lock that marks it as in use. Raises CheckpointError."""
    try:
        _, lock = scratch.claim(folder.parent, folder.name)
    except OSError as e:
        raise CheckpointError(f"{folder} on {socket.gethostname()}: cannot be made ({e.strerror})") from None
    return lock


def _check_seen(folder: Path) -> None:
    """Raise ConfigError where this rank does not see what its machine's lowest rank has made."""
    if folder.is_dir():
        return
    raise ConfigError(
        f"{folder} on {socket.gethostname()} is not seen by this rank, though it was taken for that of a rank on the same "
        "machine; set sync.folder to a folder that all machines share"
    )
