"""Membership of a server's process in the groups over which weights are broadcast. Runs inside the servers."""

import logging
import threading
import time

import torch
import torch.distributed as dist

from tepo_megatron.weight_sync.broadcast_group import BroadcastGroup, BrokenGroup, GroupSpec, join_store, signal

logger = logging.getLogger(__name__)


class Membership:
    """Membership of one process in the groups of a spec, one group for each sender. A thread forms the groups."""

    def __init__(self, spec: GroupSpec, local_rank: int, device: torch.device) -> None:
        self.groups: dict[int, BroadcastGroup] = {}
        self.joined = threading.Event()
        self._left, self._closing = threading.Event(), threading.Lock()
        self._spec, self._rank, self._device = spec, spec.first + local_rank, device
        self._store: dist.Store | None = None

    def start(self) -> None:
        """Begin to form the groups, in a thread."""
        threading.Thread(target=self._form, name="join groups", daemon=True).start()

    def _form(self) -> None:
        until = time.monotonic() + self._spec.join_seconds
        try:
            self._store = join_store(self._spec)
            signal(self._store, self._spec.joining_key(self._rank))
            for sender in range(self._spec.senders):
                group = BroadcastGroup.form(self._spec, sender, self._rank, self._device, until, self._is_wanted)
                self.groups[sender] = group
            self.joined.set()
            signal(self._store, self._spec.joined_key(self._rank))
        except (BrokenGroup, RuntimeError) as e:
            logger.warning("tepo: could not join %s: %s", self._spec.name, e)
            self._left.set()
        if self._left.is_set():
            self._close()

    def _is_wanted(self) -> bool:
        assert self._store is not None
        return not self._left.is_set() and not self._store.check([self._spec.cancelled_key()])

    def report(self, number: int) -> None:
        """Report to rank 0 of the trainer, through the store, that a round arrived. Raises BrokenGroup."""
        assert self._store is not None
        signal(self._store, self._spec.arrived_key(number, self._rank))

    def leave(self) -> None:
        """Leave the groups, or give up forming them."""
        self._left.set()
        if self.joined.is_set():
            self._close()

    def _close(self) -> None:
        with self._closing:
            self.joined.clear()
            while self.groups:
                self.groups.popitem()[1].close()
