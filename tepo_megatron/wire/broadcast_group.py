"""The process group that carries one sender's weights to the ranks of all inference servers.

Runs in the trainer and inside the servers. The default group there belongs to others and is never used. Both sides need the
same PyTorch (and NCCL), because groups of different versions do not understand each other; facts are of PyTorch 2.13.
"""

import contextlib
import datetime
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.dist.own_peers import own_peers_only
from tepo_megatron.dist.rendezvous_store import FolderStore, KeyValueStore, address_towards, connect

SENDER = 0  # rank of the sender in its group; the servers' ranks follow
POLL_SECONDS, FORMING_POLL_SECONDS = 0.0005, 0.05
# Limit since a broadcast began: NCCL's watchdog would end the process, `wait` and `close` act before; then NCCL ends it; key
# sync.transport.timeout_seconds
_NCCL_LIMIT = datetime.timedelta(days=1)


class BrokenGroup(Exception):
    """A member did not join, left, or was too slow. The group cannot be used any more."""


@dataclass(frozen=True)
class GroupSpec:
    """The spec of new process groups, one per sender: where their members rendezvous, and one server's place in them."""

    address: str  # of the trainer's store
    port: int  # of the trainer's store
    name: str  # unique to this spec
    senders: int  # number of senders, each of which has a group
    ranks: int  # members of each group
    first: int  # number of the server's first process among all processes of the servers: its rank in each group
    seconds: float  # time limit for a bucket to arrive
    join_seconds: float  # time limit for all groups to be formed
    folder: str = ""  # a store in this folder replaces the TCP store if all members are on one machine

    def at(self, first: int) -> "GroupSpec":
        """Return the same spec for another server."""
        return replace(self, first=first)

    def joining_key(self, rank: int) -> str:
        """Return the key that a server's rank puts into the store when it begins to form the groups."""
        return f"{self.name}/came/{rank}"

    def cancelled_key(self) -> str:
        """Return the key that rank 0 puts into the store when the groups are cancelled."""
        return f"{self.name}/off"

    def joined_key(self, rank: int) -> str:
        """Return the key that a server's rank puts into the store once it is in all groups."""
        return f"{self.name}/joined/{rank}"

    def arrived_key(self, number: int, rank: int) -> str:
        """Return the key that a server's rank puts into the store once it has received a round."""
        return f"{self.name}/arrived/{number}/{rank}"


@dataclass(frozen=True)
class UnchangedTensors:
    """The tensors, by Hugging Face name, that an update to `version` leaves as they are in version `base`."""

    version: int
    base: int
    names: tuple[str, ...]


class BroadcastGroup:
    """One rank's end of a sender's process group. `form` makes one."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        self._seconds, self._device = seconds, device
        self._group: Any = None
        self._work: dist.Work | None = None
        self._failed, self._until = "", 0.0
        self._given_up = threading.Event()

    @classmethod
    def form(
        cls,
        spec: GroupSpec,
        sender: int,
        rank: int,
        device: torch.device,
        until: float | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> "BroadcastGroup":
        """Form the group and broadcast one byte in it.

        NCCL connects the members in their first collective, and that call never returns if a member is missing. So a thread
        makes the call. If it is late, the thread is abandoned and the group is never used. `until`: deadline by
        `time.monotonic()`; None: `spec.join_seconds` from now. Raises BrokenGroup if a member left, the group was late, or it
        was cancelled.
        """
        formed = cls(spec.seconds, device)
        until = time.monotonic() + spec.join_seconds if until is None else until
        forming = threading.Thread(target=formed._form, args=(spec, sender, rank), name="form group", daemon=True)
        forming.start()
        try:
            while forming.is_alive() and time.monotonic() < until and wanted():
                forming.join(FORMING_POLL_SECONDS)
        finally:
            if forming.is_alive():
                formed._given_up.set()
        if formed._given_up.is_set():
            raise BrokenGroup(f"group {sender} was called off, or not formed within {spec.join_seconds:g} s")
        if formed._failed:
            raise BrokenGroup(formed._failed)
        return formed

    def _form(self, spec: GroupSpec, sender: int, rank: int) -> None:
        group: Any = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is set per thread
        try:
            group = form_group(spec, sender, rank, self._device)
            work: dist.Work = group.broadcast(
                [torch.zeros(1, dtype=torch.uint8, device=self._device)], _from_sender(spec.join_seconds)
            )
            while not work.is_completed() and not self._given_up.is_set():
                time.sleep(POLL_SECONDS)
            if not self._given_up.is_set():
                work.wait()
                self._group = group
        except (RuntimeError, OSError, BrokenGroup) as e:
            self._failed = _first_line(e)
        if group is not None and self._device.type == "cuda" and (self._failed or self._given_up.is_set()):
            group.abort()

    def start(self, row: Tensor) -> None:
        """Start to send a contiguous uint8 buffer of the group's device, or to receive into it. Collectives: one broadcast."""
        self._until = time.monotonic() + self._seconds
        try:
            self._work = self._group.broadcast([row], _from_sender(self._seconds))
        except RuntimeError as e:
            self._failed = _first_line(e)

    def wait(self) -> None:
        """Poll until the started broadcast is over: NCCL's own wait returns too early, or never. Raises BrokenGroup."""
        work: dist.Work | None = self._work
        self._work = None
        if self._failed:
            raise BrokenGroup(self._failed)
        try:
            while work is not None and not work.is_completed():
                if time.monotonic() > self._until + self._seconds:  # gloo itself fails after `seconds`
                    raise BrokenGroup(f"not over after {2 * self._seconds:g} s")
                time.sleep(POLL_SECONDS)
            if work is not None:
                work.wait()
        except RuntimeError as e:
            raise BrokenGroup(_first_line(e)) from None

    def close(self) -> None:
        """Leave the group; members that wait for this one fail at once."""
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()
        self._group, self._work = None, None


def join_store(spec: GroupSpec) -> FolderStore | dist.TCPStore:
    """Open the spec's store. Raises BrokenGroup if it cannot be reached, or if other users could write in it."""
    try:
        if spec.folder:
            return FolderStore(Path(spec.folder))
        return connect(spec.address, spec.port, spec.join_seconds)
    except (RuntimeError, OSError) as e:
        raise BrokenGroup(_first_line(e)) from None


def signal(store: KeyValueStore, key: str) -> None:
    """Put a key into a store; once this has returned, all members see the key. Raises BrokenGroup.

    `set` does not suffice: the store does not answer it, so a message on another path (an HTTP response) may overtake it.
    """
    try:
        store.add(key, 1)
    except (RuntimeError, OSError) as e:
        raise BrokenGroup(_first_line(e)) from None


def _from_sender(seconds: float) -> Any:
    """Return the options of a broadcast from the sender, which gloo gives up after `seconds`."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = SENDER, 0, datetime.timedelta(seconds=seconds)
    return options


def form_group(spec: GroupSpec, sender: int, rank: int, device: torch.device) -> Any:
    """Form a process group over the interface to the trainer: NCCL for GPUs, else gloo, which connects all members."""
    timeout = datetime.timedelta(seconds=spec.join_seconds)
    joined, name = join_store(spec), f"{spec.name}/{sender}"
    store = joined.of_group(name) if isinstance(joined, FolderStore) else dist.PrefixStore(name, joined)
    store.set_timeout(timeout)
    if device.type == "cuda":
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = _NCCL_LIMIT
        return ProcessGroupNCCL(store, rank, spec.ranks, nccl)
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    gloo = ProcessGroupGloo._Options()
    gloo._devices = [ProcessGroupGloo.create_device(hostname=address_towards(spec.address))]
    gloo._timeout, gloo._threads = timeout, 1
    with own_peers_only() if spec.folder else contextlib.nullcontext():
        return ProcessGroupGloo(store, rank, spec.ranks, gloo)


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0][:300]
