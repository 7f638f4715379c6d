"""Trainer and engine on the same devices: a state machine for which of them holds device memory.

    state      trainer on the device          engine on the device
    train      everything                     nothing
    sync       parameters                     weights, which are being sent to it
    generate   nothing                        weights and KV cache
    repair     parameters                     everything; a restarted server is receiving its weights

Trainer and engine are never both fully on the device, neither in a state nor during a transition: each waits until the other
has released its memory on every rank. On a CPU the device memory is host memory and the states are the same: gradients and
freed memory are returned to the system, while parameters and the optimizer's state stay in place.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.engines.engine import EnginePart, Sleepable

if TYPE_CHECKING:
    from tepo_megatron.actor.actor import Actor

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
