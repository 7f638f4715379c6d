"""The contract of the engine in a push of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from tepo_megatron.weight_sync.broadcast_group import GroupSpec, Recipient, Source


class WeightReceiver(Protocol):
    """The side of an engine that receives weights. Rank 0 holds it. See `inference.engine.RolloutEngine`."""

    def begin_update(self, version: int) -> None:
        """Begin an update to `version`, of which all weights follow. Raises SyncError."""

    @property
    def base(self) -> int | None:
        """The version that all servers in the update had before it; None: they have no version in common."""

    def keep(self, names: Sequence[str]) -> None:
        """Keep these tensors as they are in version `base`; the update does not send them. Raises SyncError."""

    @property
    def takers(self) -> tuple[Recipient, ...]:
        """The recipients: the servers in the update in progress."""

    def join(self, meetings: Mapping[Recipient, GroupSpec]) -> Future[None]:
        """Have each recipient join the process groups of its group spec."""

    def load(self, sources: Sequence[Source]) -> Future[None]:
        """Have the recipients load a round. The sources are in use until the future is done; its error is a SyncError."""

    def finish_update(self) -> None:
        """Serve the new weights: all of them have been sent. Raises SyncError."""

    def verify(self, sent: Mapping[str, int]) -> None:
        """Compare the served tensors with the CRC-32 of the sent ones, by Hugging Face name. Raises SyncError."""
