"""Delivery of the actor's weights through process groups (gloo on CPU, NCCL on GPUs), in the rounds of `rounds.py`.

Each sender is rank 0 of a group of its own, whose other members are all ranks of all inference servers: so every byte of the
model is broadcast once, by who has it, and no rank of the trainer takes another's. A bucket is one row of bytes; while it is on
its way, the next one is gathered into a second row. Nothing here touches the default group.

The groups last while the same servers live. When one dies, freezes or comes back, new groups are formed by those that take
part, and a round that a living rank lacks is sent again to all; who has it drops it. So nobody is given weights half-way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from tepo_megatron.channel import (
    SENDER,
    BrokenChannel,
    Bucket,
    Channel,
    Meeting,
    Source,
    Taker,
    arrived_key,
    came_key,
    join_store,
    joined_key,
    off_key,
    pack,
    tell,
)
from tepo_megatron.config import SyncConfig
from tepo_megatron.errors import ConfigError, ConversionError, SyncError
from tepo_megatron.meeting_store import Store
from tepo_megatron.parallel import Groups
from tepo_megatron.watch import JOINING, here
from tepo_megatron.weights.gather import Binding
from tepo_megatron.weights.meeting import OwnedStore, own_address
from tepo_megatron.weights.ops import Architecture
from tepo_megatron.weights.rounds import Rounds, is_check_due

ATTEMPTS = 3  # to send a round to servers that all live
JOIN_POLL_SECONDS = 0.05


class GroupReceiver(Protocol):
    """The side of an engine that takes weights from groups. See `rollout.engine.RolloutEngine`."""

    @property
    def takers(self) -> tuple[Taker, ...]:
        """The servers in the update under way."""

    def begin_update(self, version: int) -> None:
        """All weights of `version` are to follow. Raises SyncError."""

    def join(self, meetings: Mapping[Taker, Meeting]) -> Future[None]:
        """Have them meet the senders."""

    def load(self, sources: Sequence[Source]) -> Future[None]:
        """Have them take a round."""

    def finish_update(self) -> None:
        """That was all: serve them. Raises SyncError."""

    def verify(self, sent: Mapping[str, int]) -> None:
        """Whether what is served is what was sent: tensors with these CRC-32. Raises SyncError."""


@dataclass
class _Round:
    """A round on its way. bucket, row: this rank's, None if it has none; sent: there were groups to send it to; loading: the
    servers' work, on rank 0; attempts: to send it to the same servers; fault: why this rank has none.
    """

    number: int
    bucket: Bucket | None = None
    row: Tensor | None = None
    sent: bool = False
    loading: Future[None] | None = None
    attempts: int = 0
    fault: ConversionError | None = None


class BroadcastSync:
    """Pushes the weights of `bindings` to `receiver` (given on rank 0 only) through process groups.

    Collectives over the host group: two all-gathers here; in a push three for each round, two for each meeting and two more.
    sent_bytes: what this rank has handed to broadcasts.
    """

    def __init__(
        self,
        cfg: SyncConfig,
        bindings: Sequence[Binding],
        arch: Architecture,
        groups: Groups,
        receiver: GroupReceiver | None,
    ) -> None:
        self.cfg, self.groups, self.receiver = cfg, groups, receiver
        self._plan = Rounds(cfg, bindings, arch, groups)
        self.rounds = self._plan.count
        self.sent_bytes = 0
        senders = self._plan.senders
        self._sender = senders.index(groups.rank) if groups.rank in senders else None  # the number of this rank's group
        self._meeting: Meeting | None = None  # at which the groups that there are were formed
        self._channel: Channel | None = None
        self._rows: list[Tensor] = []
        self._sent: dict[str, int] = {}  # CRC-32 of what this rank sent when it was checked last
        self._delivered: int | None = None  # the version
        # on rank 0
        self._owned: OwnedStore | None = None
        self._store: Store | None = None  # that one
        self._address = ""
        self._ranks: dict[Taker, range] = {}  # of each server that was invited last, in every group
        self._meetings = 0
        self._absent: list[str] = []  # names of the servers that missed the last meeting, or the last round

    def push(self, version: int) -> None:
        """All ranks call it; when it returns, the engine serves `version`.

        Raises, on every rank, SyncError when the engine refuses the weights, or servers that live do not take them, and
        ConversionError when a rank cannot quantize. The engine can only be closed then.
        """
        try:
            under_way: _Round | None = None
            for i in range(self.rounds):
                gathered = self._gather(version, i)
                if under_way is None:
                    with self._plan.agreed():
                        if self.receiver is not None:
                            self.receiver.begin_update(version)
                else:
                    self._deliver(under_way)
                under_way = gathered
                self._send(under_way)
            if under_way is not None:
                self._deliver(under_way)
            with self._plan.agreed():
                if self.receiver is not None:
                    self.receiver.finish_update()
            if self._is_due(version):
                self._plan.verify(self.receiver, self._sent)
            self._delivered = version
        except BaseException:
            self._leave()
            raise
        finally:
            self._rows = []

    def _gather(self, version: int, i: int) -> _Round:
        """This rank's bucket of round `i`, in one of two rows that are used in turn."""
        row = self._row(i % 2)
        try:
            contents = pack(self._plan.tensors(i), row, self._is_due(version))
        except ConversionError as e:
            return _Round(i, fault=e)
        self._sent |= {c.name: c.crc32 for c in contents if c.crc32 is not None}
        if self._sender is None or not contents:
            return _Round(i)
        bucket = Bucket(i, self._sender, contents)
        return _Round(i, bucket, row[: bucket.nbytes])

    def _is_due(self, version: int) -> bool:
        """Whether this delivery is checked."""
        return is_check_due(version, self._delivered, self.cfg.verify_every)

    def _row(self, which: int) -> Tensor:
        while len(self._rows) <= which:
            self._rows.append(torch.empty(self._plan.largest, dtype=torch.uint8, device=self.groups.device))
        return self._rows[which]

    def _send(self, it: _Round) -> None:
        """Begin to send a round, in new groups if others take part than are in those that there are."""
        with self._plan.agreed() as said:
            if it.fault is not None:
                raise it.fault
            said.mine = it.bucket, self._invitation()
        told: list[tuple[Bucket | None, Meeting | None]] = said.all
        invitation = told[0][1]
        it.loading, it.attempts = None, it.attempts + 1
        it.sent = invitation is not None and (invitation == self._meeting or self._meet(invitation))
        if not it.sent:
            return
        if self.receiver is not None:
            it.loading = self.receiver.load([bucket for bucket, _ in told if bucket is not None])
        if it.row is not None and self._channel is not None:
            self._channel.start(it.row)
            self.sent_bytes += it.row.nbytes

    def _deliver(self, it: _Round) -> None:
        """Return when all servers that live have a round that was sent; it is sent again when one has not. Raises SyncError."""
        while not self._arrived(it):
            self._send(it)

    def _arrived(self, it: _Round) -> bool:
        """Whether all have it, once it is no longer on its way. Broken groups are left."""
        broken = arrived = False
        try:
            if self._channel is not None:
                self._channel.wait()
        except BrokenChannel:
            broken = True
        with self._plan.agreed():
            if self.receiver is not None:
                if it.loading is not None:
                    it.loading.result()
                takers = self.receiver.takers
                arrived = not takers or (it.sent and self._is_here(it.number, takers))
                if set(takers) != set(self._ranks):
                    broken, it.attempts = True, 0
                elif not arrived and it.attempts >= ATTEMPTS:
                    raise SyncError(self._not_taken(it))
        told = self._plan.from_all((broken, arrived))
        if any(broken for broken, _ in told) or not told[0][1]:
            self._leave()
        return bool(told[0][1])

    def _is_here(self, number: int, takers: Sequence[Taker]) -> bool:
        """Whether every rank of these servers has said that it has the round."""
        assert self._meeting is not None
        keys = {t: [arrived_key(self._meeting, number, rank) for rank in self._ranks[t]] for t in takers}
        self._absent = [taker.name for taker, its in keys.items() if not self._said(its)]
        return not self._absent

    def _said(self, keys: Sequence[str]) -> bool:
        """Whether all of these are in the store; they are removed."""
        assert self._store is not None
        there = [key for key in keys if self._store.check([key])]
        for key in there:
            self._store.delete_key(key)
        return len(there) == len(keys)

    def _invitation(self) -> Meeting | None:
        """The meeting of the groups that there are, while they suit, or another; None where there is nobody to invite."""
        takers = self.receiver.takers if self.receiver is not None else ()
        if not takers:
            return None
        if self._meeting is not None and takers == tuple(self._ranks):
            return self._meeting
        if self._owned is None:
            try:
                self._address = self.cfg.address or own_address([taker.host for taker in takers])
                self._owned = OwnedStore(self._address)
                self._store = self._owned.store
            except OSError as e:
                raise ConfigError(
                    f"sync.address={self.cfg.address}: no port at {self._address or 'an address of this machine'} ({e}); set "
                    "it to an IPv4 address of rank 0's machine that the servers reach"
                ) from None
        end = SENDER + 1
        self._ranks = {}
        for taker in takers:
            self._ranks[taker] = range(end, end + taker.ranks)
            end += taker.ranks
        self._meetings += 1
        name, senders = f"meeting-{self._meetings}", len(self._plan.senders)
        seconds, join_seconds = self.cfg.timeout_seconds, self.cfg.join_limit(self.groups.device.type)
        owned = self._owned
        return Meeting(self._address, owned.port, name, senders, end, SENDER, seconds, join_seconds, owned.folder)

    def _meet(self, meeting: Meeting) -> bool:
        """Form the groups. Whether all came. The watchdog reports a rank that never leaves this phase."""
        self._leave()
        joining = self.receiver.join({t: meeting.at(r.start) for t, r in self._ranks.items()}) if self.receiver else None
        until = time.monotonic() + meeting.join_seconds
        with here.within(f"{JOINING} {meeting.name}"):
            if self._sender is not None:
                with contextlib.suppress(BrokenChannel):
                    store = self._store or join_store(meeting)
                    device = self.groups.device
                    self._channel = Channel(
                        meeting, self._sender, SENDER, device, until, lambda: self._is_wanted(meeting, store)
                    )
            came = self._sender is None or self._channel is not None
            with self._plan.agreed():
                if joining is not None:
                    joining.result()
                    came = self._all_joined(meeting, until) and came
            if not all(self._plan.from_all(came)):
                self._leave()
                return False
        self._meeting = meeting
        return True

    def _is_wanted(self, meeting: Meeting, store: Store) -> bool:
        """Whether the invited servers all live; rank 0 tells the others through the store when one does not."""
        if self.receiver is not None and self.receiver.takers != tuple(self._ranks):
            tell(store, off_key(meeting))
            return False
        return self.receiver is not None or not store.check([off_key(meeting)])

    def _all_joined(self, meeting: Meeting, until: float) -> bool:
        """Whether all ranks of the invited servers are in all groups. Rank 0 waits for it, while all these servers live."""
        assert self._store is not None
        joined = [joined_key(meeting, rank) for ranks in self._ranks.values() for rank in ranks]
        while not self._store.check(joined):
            if time.monotonic() > until or not self._is_wanted(meeting, self._store):
                tell(self._store, off_key(meeting))
                self._absent = self._without(meeting, came_key) or self._without(meeting, joined_key)
                return False
            time.sleep(JOIN_POLL_SECONDS)
        return self._said(joined)

    def _without(self, meeting: Meeting, key: Callable[[Meeting, int], str]) -> list[str]:
        """Names of the invited servers with a rank that has not put its key into the store."""
        assert self._store is not None
        lacking = {t for t, ranks in self._ranks.items() for rank in ranks if not self._store.check([key(meeting, rank)])}
        return [taker.name for taker in self._ranks if taker in lacking]

    def _leave(self) -> None:
        """Leave this rank's group: who still waits in it fails at once."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._meeting = None

    def _not_taken(self, it: _Round) -> str:
        assert self._owned is not None
        who = ", ".join(self._absent) or "inference servers"
        what, key, seconds = "meet the trainer's ranks", "sync.join_seconds", self.cfg.join_limit(self.groups.device.type)
        if it.sent:
            what, seconds = "take a round of weights", self.cfg.timeout_seconds
            key = "sync.timeout_seconds (or rather rollout.server's silent_seconds with it)"
        return (
            f"{who}: alive, but did not {what} in {ATTEMPTS} attempts of {seconds:g} s, {self._owned.where}; "
            f"see the log, raise {key}, or set sync.address to an address of this machine that the servers reach"
        )

    def close(self) -> None:
        """Leave the groups. A second call does nothing."""
        self._leave()
        if self._owned is not None:
            self._owned.close()
        self._store = self._owned = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
