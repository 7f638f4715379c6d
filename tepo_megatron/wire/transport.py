"""The two interfaces of a push: `WeightTransport` sends rounds of buckets, and `WeightReceiver` is the engine's side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tepo_megatron.wire.broadcast_group import GroupSpec
from tepo_megatron.wire.bucket_format import Source


@dataclass(frozen=True)
class Recipient:
    """A recipient: one server in an update."""

    name: str
    host: str
    ranks: int  # number of its ranks
    incarnation: int  # differs from its value before a restart of the server


class Pending(Protocol):
    """The result of something that goes on elsewhere: a `LoopFuture`, or an answer that is under way."""

    def result(self) -> Any:
        """Wait until it is done; raise its error, or one that names a service or event loop that does not go on."""


class WeightReceiver(Protocol):
    """The side of an engine that receives weights. Rank 0 holds it. See `engines.engine.RolloutEngine`."""

    def begin_update(self, version: int) -> None:
        """Begin an update to `version`, of which all weights follow. Raises SyncError."""

    @property
    def base(self) -> int | None:
        """The version that all servers in the update had before it; None: they have no version in common."""

    def keep_unchanged(self, names: Sequence[str]) -> None:
        """Keep these tensors as they are in version `base`; the update does not send them. Raises SyncError."""

    @property
    def recipients(self) -> tuple[Recipient, ...]:
        """The recipients: the servers in the update in progress."""

    def join_groups(self, specs: Mapping[Recipient, GroupSpec]) -> Pending:
        """Have each recipient join the process groups of its group spec."""

    def load(self, sources: Sequence[Source]) -> Pending:
        """Have the recipients load a round. The sources are in use until the future is done; its error is a SyncError."""

    def finish_update(self) -> None:
        """Serve the new weights: all of them have been sent. Raises SyncError."""

    def verify(self, sent: Mapping[str, int]) -> None:
        """Compare the served tensors with the CRC-32 of the sent ones, by Hugging Face name. Raises SyncError."""


class StagedBucket(NamedTuple):
    """One rank's bucket of a round, ready to be loaded."""

    source: Source  # what the engine is given
    checksums: dict[str, int]  # CRC-32 of its tensors by name; empty if the delivery is not checked
    nbytes: int = 0  # bytes that are sent of its tensors


class WeightTransport(Protocol):
    """Carries the rounds of a push from the ranks to the engine. All ranks make the same calls.

    A round is staged, started, waited for and completed. The next round is staged while one is loaded, so a transport holds two
    rounds at most. Rounds in which no rank has anything to send are staged but not started, and not counted.
    """

    def stage(self, version: int, number: int, tensors: Iterable[tuple[str, Tensor]], checked: bool) -> StagedBucket | None:
        """Put this rank's bucket where it can be loaded from; return None if it is empty.

        `RelayTransport` makes collective calls here; it iterates the tensors like all others, which gathers them over tp.
        """

    def start(self, sources: Sequence[Source]) -> None:
        """Begin to load the staged round and return. Collective: see the class."""

    def wait(self) -> Any:
        """Return this rank's report once the started round is no longer in flight here. No collective."""

    def complete(self, reports: Sequence[Any]) -> None:
        """Return when all recipients that live have the round. Collective: see the class."""

    def finish(self) -> None:
        """Release what the update still holds after it has succeeded. Other ranks may already have begun the next update."""

    def abort(self) -> None:
        """Release what the update still holds after it has failed."""

    def close(self) -> None:
        """Close the transport for good. A second call does nothing."""
