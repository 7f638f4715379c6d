"""State of a weight update inside a process of an inference server: what was received, and the groups it is received over.

The same code runs in the servers of all engines. Weights come in files, in memory that the trainer shares, or by broadcast.
A broadcast round is received in full before the model is touched. Then each process reports it in the trainer's store, because
an engine's own answer says nothing about its single ranks, and some engines end on an error. Nothing is kept of a round that
did not arrive. The trainer sends it again in new groups, and the processes that have it already drop it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tepo_megatron.weight_sync.broadcast_group import (
    BroadcastGroup,
    BrokenChannel,
    Bucket,
    GroupSpec,
    UnchangedTensors,
    join_store,
    signal,
)
from tepo_megatron.weight_sync.ipc import open_buffer
from tepo_megatron.weight_sync.receiver.weight_files import Update, tensors

logger = logging.getLogger(__name__)
_CPU = torch.device("cpu")


class RankReceiver:
    """Receiver of weight updates, one per process of a server.

    Attributes:
        lent: The round that was taken last lies in memory of the trainer, which overwrites it two rounds later.
        membership: Membership in the groups that were joined last; None while there is none.
    """

    def __init__(self) -> None:
        self.lent = False
        self._update: Update | None = None
        self._next = 0  # number of the next round
        # Versions of the model now, before the update under way, and after it. None where an update did not state its version
        # (only `keep` states it).
        self._version: int | None = None
        self._before: int | None = None
        self._coming: int | None = None
        self._device = _CPU
        self.membership: Membership | None = None

    def begin(self, model: str | Path, tied_embeddings: bool, device: torch.device = _CPU) -> None:
        """Begin an update, and forget what an earlier one gave.

        Args:
            model: Folder with the model's checkpoint. See `Update`.
            tied_embeddings: The output layer shares the embedding's weights. See `Update`.
            device: The model's device.
        """
        self._device = device
        self._update, self._next = Update(model, tied_embeddings), 0
        self._before, self._version, self._coming = self._version, None, None

    def keep(self, kept: UnchangedTensors) -> None:
        """Note the tensors that the update leaves unchanged.

        Raises ValueError for tensors that the model does not have, or if the weights here are not of version `kept.base`.
        """
        assert self._update is not None, "the update has to begin first"
        if kept.names and kept.base != self._before:
            raise ValueError(
                f"{len(kept.names)} tensors of version {kept.base} are to stay, but the weights here are of another "
                f"({self._before if self._before is not None else 'unknown'})"
            )
        self._update.keep(kept.names)
        self._coming = kept.version

    @property
    def kept(self) -> frozenset[str]:
        """Hugging Face names of the tensors that the update under way leaves unchanged."""
        assert self._update is not None, "the update has to begin first"
        return self._update.kept

    def join(self, meeting: GroupSpec, device: torch.device) -> None:
        """Leave the old process groups and begin to form new ones.

        A thread forms them, so that the server answers health requests meanwhile. Errors are only logged: the trainer notices
        that the report of this rank is missing in its store.

        Args:
            meeting: Where the groups are formed. The rank here is `meeting.first` plus the rank in the server's default group.
            device: Device of the groups' tensors.
        """
        self.leave()
        self._device = device
        rank = meeting.first + (dist.get_rank() if dist.is_initialized() else 0)
        self.membership = Membership(meeting, rank, device)
        self.membership.start()

    def leave(self) -> None:
        """Leave all groups."""
        if self.membership is not None:
            self.membership.leave()
        self.membership = None

    def take(self, sources: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Receive one round, and return an iterator over its (name, tensor), which has to be used up before the next round.

        Collectives: for a broadcast round, one broadcast per bucket, in the same order on all ranks of the server.

        Args:
            sources: Paths of safetensors files, or the output of `Bucket.to_json`.

        Returns:
            None if there is nothing to load, because the round did not arrive or was loaded already.

        Raises:
            ValueError: The tensors are not the model's (see `Update.add`), or the round is out of order. The iterator raises it
                for a tensor that was damaged.
        """
        assert self._update is not None, "the update has to begin first"
        buckets = [Bucket.from_json(source) for source in sources if source.startswith("{")]
        self.lent = False
        if not buckets:
            self._update.add_files(sources)
            return tensors(sources)
        number = buckets[0].number
        self.lent = lent = buckets[0].handle is not None
        rows = [] if lent else self._receive(buckets)
        if rows is None or (number == self._next - 1 and not lent):
            return None
        if number != self._next:
            raise ValueError(f"round {number} of the update came when round {self._next} was due")
        self._update.add([(c.name, list(c.shape)) for bucket in buckets for c in bucket.contents])
        self._next += 1
        if lent:
            return self._borrow(buckets)
        return (item for bucket, row in zip(buckets, rows, strict=True) for item in bucket.tensors(row))

    def _borrow(self, buckets: Sequence[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of each bucket in turn.

        The trainer's memory of a bucket is mapped only while its tensors are read.
        """
        for bucket in buckets:
            assert bucket.handle is not None
            with open_buffer(bucket.handle, self._device) as row:
                yield from bucket.tensors(row)

    def finish(self) -> None:
        """End the update. Raises ValueError if a tensor of the model was not given."""
        assert self._update is not None, "the update has to begin first"
        self._update.finish()
        self._version = self._coming

    def _receive(self, buckets: Sequence[Bucket]) -> list[torch.Tensor] | None:
        """Receive the buckets' rows of bytes (uint8), in the order that all ranks of the server follow.

        None: they did not arrive.
        """
        member = self.membership
        if member is None or not member.joined.is_set():
            return None
        rows = []
        try:
            for bucket in buckets:
                row = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
                member.channels[bucket.sender].start(row)
                member.channels[bucket.sender].wait()
                rows.append(row)
            member.tell_arrived(buckets[0].number)
        except BrokenChannel as e:
            logger.warning("tepo: round %d did not arrive: %s", buckets[0].number, e)
            self.leave()
            return None
        return rows


class Membership:
    """Membership of one process in the groups of a meeting, one group for each sender. A thread forms the groups.

    Args:
        meeting: Where the groups are formed.
        rank: Rank of this process in each group.
        device: Device of the groups' tensors.

    Attributes:
        channels: One channel per sender; complete once `joined` is set.
        joined: Set while this process is in all groups.
    """

    def __init__(self, meeting: GroupSpec, rank: int, device: torch.device) -> None:
        self.channels: list[BroadcastGroup] = []
        self.joined = threading.Event()
        self._left, self._closing = threading.Event(), threading.Lock()
        self._meeting, self._rank, self._device = meeting, rank, device
        self._store: dist.Store | None = None

    def start(self) -> None:
        """Begin to form the groups, in a thread."""
        threading.Thread(target=self._form, name="join groups", daemon=True).start()

    def _form(self) -> None:
        until = time.monotonic() + self._meeting.join_seconds
        try:
            self._store = join_store(self._meeting)
            signal(self._store, self._meeting.came_key(self._rank))
            for sender in range(self._meeting.senders):
                channel = BroadcastGroup.form(self._meeting, sender, self._rank, self._device, until, self._is_wanted)
                self.channels.append(channel)
            self.joined.set()
            signal(self._store, self._meeting.joined_key(self._rank))
        except (BrokenChannel, RuntimeError) as e:
            logger.warning("tepo: could not join %s: %s", self._meeting.name, e)
            self._left.set()
        if self._left.is_set():
            self._close()

    def _is_wanted(self) -> bool:
        assert self._store is not None
        return not self._left.is_set() and not self._store.check([self._meeting.off_key()])

    def tell_arrived(self, number: int) -> None:
        """Report to rank 0 of the trainer, through the store, that the round `number` arrived. Raises BrokenChannel."""
        assert self._store is not None
        signal(self._store, self._meeting.arrived_key(number, self._rank))

    def leave(self) -> None:
        """Leave the groups, or give up forming them."""
        self._left.set()
        if self.joined.is_set():
            self._close()

    def _close(self) -> None:
        with self._closing:
            self.joined.clear()
            while self.channels:
                self.channels.pop().close()
