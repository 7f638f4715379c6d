"""The state of a fleet's servers at a moment, and the checks that a fleet makes on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tepo_megatron.errors import RolloutError, TepoError
from tepo_megatron.inference.engine import UNKNOWN_VERSION
from tepo_megatron.inference.servers.endpoint import Endpoint
from tepo_megatron.inference.servers.slot import ServerSlot


@dataclass(frozen=True)
class ServerStatus:
    """The state of one server of a fleet at a moment.

    Attributes:
        name: Name of the server in messages.
        up: The server takes requests.
        running: The server is alive, as far as this is known without a request. One that is starting is not up yet.
        lost: The error for which the server is no longer restarted; None while it is not lost.
        restarts: Number of restarts so far, planned ones included.
        version: Version of the weights that the server serves.
        in_flight: Number of requests in flight.
    """

    name: str
    up: bool
    running: bool
    lost: TepoError | None
    restarts: int
    version: int
    in_flight: int


def status_of(member: ServerSlot[Endpoint]) -> ServerStatus:
    """Return the state of one server now."""
    endpoint = member.endpoint
    return ServerStatus(
        name=endpoint.name,
        up=member.up,
        running=endpoint.running,
        lost=member.lost,
        restarts=member.restart_count,
        version=endpoint.version,
        in_flight=endpoint.in_flight,
    )


def require_enough(members: Sequence[ServerSlot[Endpoint]], min_servers: int) -> None:
    """Raise RolloutError if fewer than `min_servers` servers are left.

    Args:
        members: All slots of the fleet.
        min_servers: `rollout.min_servers`.
    """
    lost = [m.lost for m in members if m.lost is not None]
    left = len(members) - len(lost)
    if left < min_servers:
        if len(members) == 1:
            raise RolloutError(str(lost[0]))
        reasons = "\n".join(str(error) for error in lost)
        raise RolloutError(
            f"{left} of {len(members)} inference servers are left, fewer than rollout.min_servers={min_servers}:\n{reasons}"
        )


def refuse_other_weights(members: Sequence[ServerSlot[Endpoint]]) -> None:
    """Raise RolloutError if a server needs weights that nobody will send (`rollout.only`)."""
    for member in members:
        if member.up and member.endpoint.version == UNKNOWN_VERSION:
            raise RolloutError(
                f"rollout.only=true samples with the weights of model.path, and {member.endpoint.name} serves others, "
                "which another run sent; start it again"
            )
