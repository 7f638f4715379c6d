"""Three optimizations of the training step (docs/performance.md), each of which can be undone by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks._step_workers import OurStep


@dataclass(frozen=True)
class Undo:
    """Undoes one optimization.

    Attributes:
        before: Undoes it in a process that has not loaded Megatron-Core yet.
        after: Undoes it in a step that was built.
    """

    before: Callable[[], None] = lambda: None
    after: Callable[[OurStep], None] = lambda step: None


def _give_freed_memory_back() -> None:
    from tepo_megatron.platform import memory

    memory.keep_freed_memory = lambda: None


def _copy_in_groups_of_one() -> None:
    from tepo_megatron.platform import gloo

    gloo.shorten_groups_of_one = lambda: None


def _tables_of_every_layer(step: OurStep) -> None:
    step.actor.config.apply_rope_fusion = False  # use Megatron-Core's own rotary embedding


OPTIMIZATIONS = {
    "rotary tables shared by the layers": Undo(after=_tables_of_every_layer),
    "freed memory stays": Undo(before=_give_freed_memory_back),
    "no copies in groups of one": Undo(before=_copy_in_groups_of_one),
}
