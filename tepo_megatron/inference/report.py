"""The state of an engine's servers at one moment, for those who watch a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

ServerState = Literal["serving", "waiting_for_weights", "asleep", "starting", "lost"]
STATES: tuple[ServerState, ...] = ("serving", "waiting_for_weights", "asleep", "starting", "lost")


@dataclass(frozen=True)
class ServerReport:
    """One server."""

    name: str
    state: ServerState
    version: int
    in_flight: int
    restarts: int


@dataclass(frozen=True)
class EngineReport:
    """All servers."""

    servers: Sequence[ServerReport]
    queued: int
    version: int
    texts: Mapping[str, str]
