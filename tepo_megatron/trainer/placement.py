"""Trainer and engine on the same devices: a state machine for which of them holds device memory, and a report of the memory.

    state      trainer on the device          engine on the device
    train      everything                     nothing
    sync       parameters                     weights, which are being sent to it
    generate   nothing                        weights and KV cache
    repair     parameters                     everything; a restarted server is receiving its weights

Trainer and engine are never both fully on the device, neither in a state nor during a transition: each waits until the other
has released its memory on every rank. On a CPU the device memory is host memory and the states are the same: gradients and
freed memory are returned to the system, while parameters and the optimizer's state stay in place.

The memory of ranks and servers at the end of each phase is reported as step metrics, and as one table at the end of the run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from tepo_megatron.dist.objects import all_gather_object
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.dist.platform.memory import MemoryUsage, reset_peak, usage
from tepo_megatron.engines.engine import EnginePart, Sleepable

if TYPE_CHECKING:
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.trainer.service_client import ServiceEngine

State = Literal["train", "sync", "generate", "repair"]
_WAYS: dict[State, tuple[State, ...]] = {
    "train": ("sync",), "sync": ("generate",), "generate": ("train", "repair"), "repair": ("generate",),
}  # fmt: skip


class Disaggregated:
    """The disaggregated placement: the engine has devices of its own, so neither side waits for the other."""

    shared = False
    engine_sleeps = False

    def generate(self, push: Callable[[], None]) -> None:
        """Call `push` to send the weights that the engine is to serve."""
        push()

    def train(self, abort: bool = False) -> None:
        """Make the actor ready for training, saving and export. `abort` gives up what is being sampled."""

    def repair(self, push: Callable[[], None]) -> None:
        """Call `push` to send the weights to a server that was restarted while the engine serves."""
        push()


class Colocated(Disaggregated):
    """The colocated placement. It starts in `train` with the engine asleep. All ranks must call every method."""

    shared = True

    def __init__(self, trainer: "Actor", engine: Sleepable | None, groups: ParallelDims) -> None:
        self._trainer, self._engine, self._groups = trainer, engine, groups
        self.state: State = "train"

    @property
    def engine_sleeps(self) -> bool:  # type: ignore[override]
        """Return whether the engine cannot serve requests."""
        return self.state != "generate"

    def generate(self, push: Callable[[], None]) -> None:
        """Go from `train` over `sync` to `generate`: the engine gets the weights that `push` sends, and the device."""
        self._go("sync")
        self._trainer.offload("gradients", "optimizer")
        self._wake("weights")
        push()
        self._trainer.offload("parameters")
        self._wake("kv_cache")
        self._go("generate")

    def train(self, abort: bool = False) -> None:
        """Go from `generate` to `train` (if not there already): the engine sleeps and the trainer gets the device."""
        if self.state == "train":
            return
        self._go("train")
        if self._engine is not None:
            self._engine.sleep(abort)
        barrier(self._groups)
        self._trainer.load()

    def repair(self, push: Callable[[], None]) -> None:
        """Go from `generate` to `repair` and back: `push` sends the weights again."""
        self._go("repair")
        self._trainer.load("parameters")
        push()
        self._trainer.offload("parameters")
        self._go("generate")

    def _wake(self, part: EnginePart) -> None:
        barrier(self._groups)
        if self._engine is not None:
            self._engine.wake(part)

    def _go(self, state: State) -> None:
        if state not in _WAYS[self.state]:
            ways = " or ".join(_WAYS[self.state])
            raise RuntimeError(
                f"trainer and engine cannot go from {self.state} to {state}; from {self.state} they go to {ways}"
            )
        self.state = state


def barrier(groups: ParallelDims) -> None:
    """Wait until all ranks have arrived, however long rank 0 takes. Collectives: one barrier over the host group."""
    dist.barrier(group=groups.host)


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
