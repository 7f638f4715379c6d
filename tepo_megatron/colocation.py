"""Trainer and engine on the same devices: who has released what, and in which order they change places.

    state      trainer has on the device      engine has there
    train      all                            nothing
    sync       parameters                     weights, which it is being sent
    generate   nothing                        weights and KV cache
    repair     parameters                     all; a server that was started again is being sent its weights

In no state, and on no way from one to the next, are both there in full: whoever comes waits for the other to have gone, on
every rank. On CPU the device's memory is the host's: the same states are gone through, gradients and what was freed leave the
process, and parameters and the optimizer's state stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch.distributed as dist

from tepo_megatron.actor.offload import Part
from tepo_megatron.parallel import Groups
from tepo_megatron.rollout.engine import EnginePart

State = Literal["train", "sync", "generate", "repair"]
_WAYS: dict[State, tuple[State, ...]] = {
    "train": ("sync",),
    "sync": ("generate",),
    "generate": ("train", "repair"),
    "repair": ("generate",),
}


class Trainer(Protocol):
    """Of `actor.Actor`."""

    def offload(self, *parts: Part) -> None:
        """Take parts, or all, off the device."""

    def load(self, *parts: Part) -> None:
        """Put parts, or all, back."""


class Engine(Protocol):
    """Of `rollout.engine.RolloutEngine`."""

    def sleep(self) -> None:
        """Release weights and KV cache."""

    def wake(self, part: EnginePart) -> None:
        """Take one of them again."""


class Apart:
    """In the place of colocation where the engine has devices of its own: nobody waits for anybody."""

    shared = False
    engine_sleeps = False

    def generate(self, push: Callable[[], None]) -> None:
        """Have the engine serve what `push` sends."""
        push()

    def train(self) -> None:
        """Have the actor ready to be trained, saved and exported."""

    def repair(self, push: Callable[[], None]) -> None:
        """Have a server that was started again while the engine serves get its weights, which `push` sends."""
        push()


class Colocation(Apart):
    """Begins in `train`, with the engine asleep. Every method is called by all ranks alike; engine: on rank 0 only.

    Raises RuntimeError for a way that is none, and what the engine raises.
    """

    shared = True

    def __init__(self, trainer: Trainer, engine: Engine | None, groups: Groups) -> None:
        self._trainer, self._engine, self._groups = trainer, engine, groups
        self.state: State = "train"

    @property
    def engine_sleeps(self) -> bool:  # type: ignore[override]
        """Whether the engine serves nothing."""
        return self.state != "generate"

    def generate(self, push: Callable[[], None]) -> None:
        """From `train` over `sync`: the engine serves what `push` sends, and has the device."""
        self._go("sync")
        self._trainer.offload("gradients", "optimizer")
        self._wake("weights")
        push()
        self._trainer.offload("parameters")
        self._wake("kv_cache")
        self._go("generate")

    def train(self) -> None:
        """From `generate`, if it is not there already: the engine sleeps, and the trainer has the device."""
        if self.state == "train":
            return
        self._go("train")
        if self._engine is not None:
            self._engine.sleep()
        everybody(self._groups)
        self._trainer.load()

    def repair(self, push: Callable[[], None]) -> None:
        """From `generate` and back to it."""
        self._go("repair")
        self._trainer.load("parameters")
        push()
        self._trainer.offload("parameters")
        self._go("generate")

    def _wake(self, part: EnginePart) -> None:
        everybody(self._groups)
        if self._engine is not None:
            self._engine.wake(part)

    def _go(self, state: State) -> None:
        if state not in _WAYS[self.state]:
            ways = " or ".join(_WAYS[self.state])
            raise RuntimeError(
                f"trainer and engine cannot go from {self.state} to {state}; from {self.state} they go to {ways}"
            )
        self.state = state


def everybody(groups: Groups) -> None:
    """Wait until all ranks have come here, however long rank 0 takes."""
    dist.barrier(group=groups.host)
