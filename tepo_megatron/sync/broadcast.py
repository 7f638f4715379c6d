"""Transport `group`: broadcast the buckets through process groups (gloo on CPU, NCCL on GPUs).

Each sender is rank 0 of a process group of its own; the other members are all ranks of all inference servers. So every byte of
the model is broadcast once, by a rank that has it, and no trainer rank receives another's. A bucket is one buffer of bytes.
While it is in flight, the next bucket is gathered into a second buffer. The default group is never used.

The groups last as long as the same servers live. When a server dies, hangs or comes back, new groups are formed of the servers
that take part now. A round that a live rank lacks is sent again to all; a rank that has it drops it. No server gets a partial
update.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tepo_megatron.base.errors import ConfigError, SyncError
from tepo_megatron.base.scratch import PrivateFolder
from tepo_megatron.config import GroupTransportConfig, SyncConfig
from tepo_megatron.config.fields import join_seconds
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.dist.rendezvous_store import FolderStore, KeyValueStore, address_towards, is_loopback, open_store
from tepo_megatron.monitor.hang_watchdog import JOINING, progress
from tepo_megatron.sync.buckets import BucketPlan
from tepo_megatron.sync.stores import make_folder
from tepo_megatron.wire.broadcast_group import SENDER, BroadcastGroup, BrokenGroup, GroupSpec, join_store, signal
from tepo_megatron.wire.bucket_format import Bucket, Source, pack
from tepo_megatron.wire.transport import Pending, Recipient, StagedBucket, WeightReceiver

ATTEMPTS = 3  # at sending a round, while all servers live
JOIN_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class OwnedStore:
    """A private folder if all participants are on this machine, otherwise a TCPStore on one of this machine's addresses."""

    store: KeyValueStore
    where: str
    port: int = 0
    owned: PrivateFolder | None = None

    @classmethod
    def open(cls, address: str) -> "OwnedStore":
        """Make the folder, or open the TCPStore's port."""
        if is_loopback(address):
            owned = PrivateFolder(*make_folder())
            return cls(FolderStore(owned.path), f"in {owned.path}", owned=owned)
        store = open_store(address)
        return cls(store, f"at {address}:{store.port}", store.port)

    @property
    def folder(self) -> str:
        """The folder's path, as in `GroupSpec`; "" for a TCPStore."""
        return "" if self.owned is None else str(self.owned.path)

    def close(self) -> None:
        if self.owned is not None:
            self.owned.remove()


def own_address(hosts: Sequence[str]) -> str:
    """Return this machine's address as servers on `hosts` and ranks on other machines reach it; loopback if all are here."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        hosts = [*hosts, os.environ["MASTER_ADDR"]]  # rank 0's machine, by the name that the other machines use
    addresses = [address_towards(host) for host in hosts]
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])


@dataclass
class _RoundInFlight:
    sources: Sequence[Source]  # of all ranks
    row: Tensor | None = None  # the bytes of this rank's bucket; None: it has none in this round
    sent: bool = False  # whether there were groups to send the round to
    loading: Pending | None = None  # the servers' work, on rank 0
    attempts: int = 0  # at sending the round to the same servers

    @property
    def number(self) -> int:
        assert isinstance(self.sources[0], Bucket)
        return self.sources[0].number


class _Report(NamedTuple):
    broken: bool = False  # whether the groups have to be left
    arrived: bool = True  # of rank 0: whether all recipients have the round


class GroupTransport:
    """Broadcasts the buckets to the engine's servers through process groups. See `WeightTransport`.

    Collectives over the host group: in `start` one all-gather; in `complete` two for each time that a round is sent again; in
    both two for each forming of groups. `formations`: how often new groups were formed so far, or tried to be; counted on rank
    0 only.
    """

    def __init__(self, cfg: SyncConfig, plan: BucketPlan, groups: ParallelDims, receiver: WeightReceiver | None) -> None:
        assert isinstance(cfg.transport, GroupTransportConfig)
        self.cfg, self.groups, self.receiver, self._plan = cfg.transport, groups, receiver, plan
        self.join_seconds = join_seconds(groups.device.type)
        self.sent_bytes = self.formations = 0
        self._sender = plan.senders.index(groups.rank) if groups.rank in plan.senders else None  # index among the senders
        self._spec: GroupSpec | None = None  # the spec of the current groups
        self._channel: BroadcastGroup | None = None  # of this rank as a sender
        self._rows: dict[int, Tensor] = {}  # by buffer
        self._flight: _RoundInFlight | None = None
        # the rest is used on rank 0 only
        self._owned: OwnedStore | None = None
        self._store: KeyValueStore | None = None  # `_owned.store`
        self._address = ""
        self._ranks: dict[Recipient, range] = {}  # ranks of each server of the last group spec, the same in every group
        self._absent: list[str] = []  # names of the servers that missed the last group forming or round

    def stage(self, version: int, number: int, tensors: Iterable[tuple[str, Tensor]], checked: bool) -> StagedBucket | None:
        """Pack the bucket into one of two buffers that are used in turn. See `WeightTransport.stage`."""
        contents = pack(tensors, self._row(number), checked)
        if self._sender is None or not contents:
            return None
        bucket = Bucket(number, self._sender, contents)
        return StagedBucket(bucket, bucket.checksums, bucket.nbytes)

    def _row(self, number: int) -> Tensor:
        where = number % 2
        if where not in self._rows:
            self._rows[where] = torch.empty(self._plan.largest, dtype=torch.uint8, device=self.groups.device)
        return self._rows[where]

    def start(self, sources: Sequence[Source]) -> None:
        mine = next((bucket for bucket in sources if isinstance(bucket, Bucket) and bucket.sender == self._sender), None)
        self._flight = _RoundInFlight(sources, None if mine is None else self._row(mine.number)[: mine.nbytes])
        self._send(self._flight)

    def _send(self, it: _RoundInFlight) -> None:
        """Begin to send a round, in new groups if the recipients are not those of the current groups."""
        with self._plan.raise_on_all_ranks() as replies:
            replies.mine = self._next_spec()
        invitation: GroupSpec | None = replies.all[0]
        it.loading, it.attempts = None, it.attempts + 1
        it.sent = invitation is not None and (invitation == self._spec or self._form_groups(invitation))
        if not it.sent:
            return
        if self.receiver is not None:
            it.loading = self.receiver.load(it.sources)
        if self._channel is not None and it.row is not None:
            self._channel.start(it.row)
            self.sent_bytes += it.row.nbytes

    def wait(self) -> _Report:
        """Wait until the round is no longer in flight. See `WeightTransport.wait`."""
        if (it := self._flight) is None:
            return _Report()
        broken = arrived = False
        try:
            if self._channel is not None:
                self._channel.wait()
        except BrokenGroup:
            broken = True
        if self.receiver is not None:
            if it.loading is not None:
                it.loading.result()
            recipients = self.receiver.recipients
            arrived = not recipients
            if recipients and it.sent:
                arrived = self._reported(it.number, recipients)
            if set(recipients) != set(self._ranks):
                broken, it.attempts = True, 0
            elif not arrived and it.attempts >= ATTEMPTS:
                raise SyncError(self._timeout_message(it))
        return _Report(broken, arrived)

    def complete(self, reports: Sequence[_Report]) -> None:
        """Send the round again while a live server lacks it. Broken groups are left. See `WeightTransport.complete`."""
        while self._flight is not None:
            arrived = reports[0].arrived
            if not arrived or any(report.broken for report in reports):
                self._leave()
            if arrived:
                break
            self._send(self._flight)
            with self._plan.raise_on_all_ranks() as replies:
                replies.mine = self.wait()
            reports = replies.all
        self._flight = None

    def _reported(self, number: int, recipients: Sequence[Recipient]) -> bool:
        assert self._spec is not None
        silent: list[str] = []
        for recipient in recipients:
            for rank in self._ranks[recipient]:
                if not self._take_keys([self._spec.arrived_key(number, rank)]):
                    silent.append(recipient.name)
        self._absent = list(dict.fromkeys(silent))
        return not silent

    def _take_keys(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys are in the store, and remove those that are."""
        assert self._store is not None
        present = [key for key in keys if self._store.check([key])]
        for key in present:
            self._store.delete_key(key)
        return len(present) == len(keys)

    def _next_spec(self) -> GroupSpec | None:
        """Return the spec of the current groups if they fit the recipients, or of new groups; None without recipients."""
        recipients = self.receiver.recipients if self.receiver is not None else ()
        if not recipients:
            return None
        if self._spec is not None and recipients == tuple(self._ranks):
            return self._spec
        if self._owned is None:
            try:
                self._address = self.cfg.address or own_address([recipient.host for recipient in recipients])
                self._owned = OwnedStore.open(self._address)
                self._store = self._owned.store
            except OSError as e:
                where = self._address or "an address of this machine"
                raise ConfigError(
                    f"sync.transport.address={self.cfg.address}: no port at {where} ({e}); set it to an IPv4 address "
                    "of rank 0's machine that the servers reach"
                ) from None
        end = SENDER + 1
        self._ranks = {}
        for recipient in recipients:
            self._ranks[recipient] = range(end, end + recipient.ranks)
            end += recipient.ranks
        self.formations += 1
        name, senders = f"groups-{self.formations}", len(self._plan.senders)
        seconds, owned = self.cfg.timeout_seconds, self._owned
        return GroupSpec(self._address, owned.port, name, senders, end, SENDER, seconds, self.join_seconds, folder=owned.folder)

    def _form_groups(self, spec: GroupSpec) -> bool:
        """Form the groups; return whether all members joined. The watchdog reports a rank that never leaves this phase."""
        self._leave()
        places = {recipient: spec.at(ranks.start) for recipient, ranks in self._ranks.items()}
        joining: Pending | None = self.receiver.join_groups(places) if self.receiver is not None else None
        until = time.monotonic() + spec.join_seconds
        with progress.within(f"{JOINING} {spec.name}"):
            if self._sender is not None:
                with contextlib.suppress(BrokenGroup):
                    store = self._store or join_store(spec)
                    is_wanted = partial(self._is_wanted, spec, store)
                    self._channel = BroadcastGroup.form(spec, self._sender, SENDER, self.groups.device, until, is_wanted)
            came = self._sender is None or self._channel is not None
            with self._plan.raise_on_all_ranks():
                if joining is not None:
                    joining.result()
                    came = self._all_joined(spec, until) and came
            if not all(self._plan.from_all(came)):
                self._leave()
                return False
        self._spec = spec
        return True

    def _is_wanted(self, spec: GroupSpec, store: KeyValueStore) -> bool:
        """Return whether the invited servers all live; if one does not, rank 0 signals the other ranks through the store."""
        if self.receiver is not None and self.receiver.recipients != tuple(self._ranks):
            signal(store, spec.cancelled_key())
            return False
        return self.receiver is not None or not store.check([spec.cancelled_key()])

    def _all_joined(self, spec: GroupSpec, until: float) -> bool:
        """Wait on rank 0, while the invited servers all live, until their ranks are in all groups; return whether they are."""
        assert self._store is not None
        joined = [spec.joined_key(rank) for ranks in self._ranks.values() for rank in ranks]
        while not self._store.check(joined):
            if time.monotonic() > until or not self._is_wanted(spec, self._store):
                signal(self._store, spec.cancelled_key())
                self._absent = self._without(spec, GroupSpec.joining_key) or self._without(spec, GroupSpec.joined_key)
                return False
            time.sleep(JOIN_POLL_SECONDS)
        return self._take_keys(joined)

    def _without(self, spec: GroupSpec, key: Callable[[GroupSpec, int], str]) -> list[str]:
        assert self._store is not None
        lacking = {t for t, ranks in self._ranks.items() for rank in ranks if not self._store.check([key(spec, rank)])}
        return [recipient.name for recipient in self._ranks if recipient in lacking]

    def finish(self) -> None:
        """Free the buffers. The groups last until the next update."""
        self._rows, self._flight = {}, None

    def abort(self) -> None:
        """Leave the groups and free the buffers."""
        self._leave()
        self.finish()

    def _leave(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._spec = None

    def _timeout_message(self, it: _RoundInFlight) -> str:
        assert self._owned is not None
        who = ", ".join(self._absent) or "inference servers"
        what, seconds, fix = "meet the trainer's ranks", self.join_seconds, ""
        if it.sent:
            what, seconds = "take a round of weights", self.cfg.timeout_seconds
            fix = "raise sync.transport.timeout_seconds (and rollout.server.heartbeat_timeout with it), "
        return (
            f"{who}: alive, but did not {what} in {ATTEMPTS} attempts of {seconds:g} s, {self._owned.where}; "
            f"see the log, {fix}or set sync.transport.address to an address of this machine that the servers reach"
        )

    def close(self) -> None:
        """Leave the groups and close the store. A second call does nothing."""
        self._leave()
        if self._owned is not None:
            self._owned.close()
        self._store = self._owned = None
