"""What ranks and servers hold at the end of each phase, as metrics of the step and as one table at the end of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch.distributed as dist

from tepo_megatron.parallel import Groups
from tepo_megatron.platform.memory import Usage, reset_peak, usage

Phase = Literal["generate", "train"]
_GIB = 2**30


class Servers(Protocol):
    """Of `rollout.engine.RolloutEngine`."""

    def resident_bytes(self) -> int:
        """Host memory of the engine's processes."""


@dataclass(frozen=True)
class _Measured:
    """At the end of a phase: of every rank, by rank, and of the servers' processes together, in bytes."""

    ranks: Sequence[Usage]
    servers: int


class MemoryReport:
    """Every method is called by all ranks alike; servers: on rank 0 only, where there are some. Not enabled: nothing is done.

    A phase's peak is counted from when the one before was left.
    """

    def __init__(self, groups: Groups, servers: Servers | None, *, enabled: bool) -> None:
        self._groups, self._servers, self._enabled = groups, servers, enabled
        self._last: dict[Phase, _Measured] = {}
        self._largest: dict[Phase, _Measured] = {}

    def begin_phase(self) -> None:
        """Count the peak anew."""
        if self._enabled:
            reset_peak(self._groups.device)

    def end_phase(self, phase: Phase) -> None:
        """Measure. Collectives: one all-gather over the host group."""
        if not self._enabled:
            return
        mine = usage(self._groups.device)
        ranks = [mine] * self._groups.world_size
        dist.all_gather_object(ranks, mine, group=self._groups.host)
        now = _Measured(ranks, 0 if self._servers is None else self._servers.resident_bytes())
        self._last[phase] = now
        self._largest[phase] = _larger(self._largest.get(phase, now), now)

    def values(self) -> dict[str, float | None]:
        """GiB at the end of each phase of this step: of the rank that has most, and of all servers; null where there is none.

        held, peak: what others cannot use, and its most in the phase; used: by tensors; device: of the GPU, by anybody.
        """
        values: dict[str, float | None] = {}
        for phase, measured in self._last.items():
            for name in ("held", "peak", "used", "device"):
                bytes_ = [value for rank in measured.ranks if (value := getattr(rank, name)) is not None]
                values[f"memory/{phase}_{name}"] = max(bytes_) / _GIB if bytes_ else None
            values[f"memory/{phase}_servers"] = measured.servers / _GIB
        self._last = {}
        return values

    def table(self) -> str:
        """By rank, the most at the end of each phase; empty when nothing was measured."""
        if not self._largest:
            return ""
        columns = [(phase, name) for phase in self._largest for name in ("held", "peak")]
        head = "memory, GiB".ljust(12) + "".join(f"{phase} {name}".rjust(15) for phase, name in columns)
        rows = [head]
        for rank in range(self._groups.world_size):
            cells = (getattr(self._largest[phase].ranks[rank], name) / _GIB for phase, name in columns)
            rows.append(f"rank {rank}".ljust(12) + "".join(f"{cell:15.3f}" for cell in cells))
        held = (f"{self._largest[p].servers / _GIB:15.3f}" if name == "held" else " " * 15 for p, name in columns)
        return "\n".join([*rows, "servers".ljust(12) + "".join(held)])


def _larger(a: _Measured, b: _Measured) -> _Measured:
    """Number by number."""

    def most(x: int | None, y: int | None) -> int | None:
        return x if y is None else y if x is None else max(x, y)

    ranks = [
        Usage(max(x.held, y.held), max(x.peak, y.peak), most(x.used, y.used), most(x.device, y.device))
        for x, y in zip(a.ranks, b.ranks, strict=True)
    ]
    return _Measured(ranks, max(a.servers, b.servers))
