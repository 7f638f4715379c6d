"""Report the memory of ranks and servers at the end of each phase, as step metrics and as one table at the end of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tepo_megatron.dist.objects import all_gather_object
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.dist.platform.memory import MemoryUsage, reset_peak, usage

if TYPE_CHECKING:
    from tepo_megatron.trainer.service_client import ServiceEngine

Phase = Literal["generate", "train"]
_GIB = 2**30


@dataclass(frozen=True)
class _Measured:
    ranks: Sequence[MemoryUsage]
    servers: int


class MemoryReport:
    """The memory of all ranks and servers over a run. All ranks must call every method."""

    def __init__(self, groups: ParallelDims, servers: "ServiceEngine | None", *, enabled: bool) -> None:
        self._groups, self._servers, self._enabled = groups, servers, enabled
        self._last: dict[Phase, _Measured] = {}
        self._largest: dict[Phase, _Measured] = {}

    def begin_phase(self) -> None:
        """Reset the peak."""
        if self._enabled:
            reset_peak(self._groups.device)

    def end_phase(self, phase: Phase) -> None:
        """Measure at the end of a phase. Collectives: one all-gather over the host group."""
        if not self._enabled:
            return
        ranks = all_gather_object(usage(self._groups.device), self._groups.host)
        now = _Measured(ranks, 0 if self._servers is None else self._servers.resident_bytes())
        self._last[phase] = now
        self._largest[phase] = _larger(self._largest.get(phase, now), now)

    def values(self) -> dict[str, float | None]:
        """Return the GiB at the end of each phase of this step, from the rank with the maximum; None if unavailable.

        held: memory that other processes cannot use; peak: maximum of held in the phase; used: memory in tensors; device:
        memory of the GPU in use by any process; servers: all server processes together.
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
        """Return a table of the maximum at the end of each phase, by rank; empty if nothing was measured."""
        if not self._largest:
            return ""
        columns = [(phase, name) for phase in self._largest for name in ("held", "peak")]
        rows = ["memory, GiB".ljust(12) + "".join(f"{phase} {name}".rjust(15) for phase, name in columns)]
        for rank in range(self._groups.world_size):
            cells = (getattr(self._largest[phase].ranks[rank], name) / _GIB for phase, name in columns)
            rows.append(f"rank {rank}".ljust(12) + "".join(f"{cell:15.3f}" for cell in cells))
        held = (f"{self._largest[p].servers / _GIB:15.3f}" if name == "held" else " " * 15 for p, name in columns)
        return "\n".join([*rows, "servers".ljust(12) + "".join(held)])


def _larger(a: _Measured, b: _Measured) -> _Measured:
    def most(x: int | None, y: int | None) -> int | None:
        return x if y is None else y if x is None else max(x, y)

    ranks = [
        MemoryUsage(max(x.held, y.held), max(x.peak, y.peak), most(x.used, y.used), most(x.device, y.device))
        for x, y in zip(a.ranks, b.ranks, strict=True)
    ]
    return _Measured(ranks, max(a.servers, b.servers))
