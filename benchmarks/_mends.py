"""The three costs that were avoidable (docs/performance.md), put back one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks._step_workers import OurStep


@dataclass(frozen=True)
class Mend:
    """before: undoes it in a process that has not loaded Megatron-Core yet; after: in a step that was built."""

    before: Callable[[], None] = lambda: None
    after: Callable[[OurStep], None] = lambda step: None


def _give_freed_memory_back() -> None:
    from tepo_megatron.platform import memory

    memory.keep_freed_memory = lambda: None


def _copy_in_groups_of_one() -> None:
    from tepo_megatron.platform import gloo

    gloo.shorten_groups_of_one = lambda: None


def _tables_of_every_layer(step: OurStep) -> None:
    step.actor.config.apply_rope_fusion = False  # Megatron-Core's own form


MENDS = {
    "rotary tables shared by the layers": Mend(after=_tables_of_every_layer),
    "freed memory stays": Mend(before=_give_freed_memory_back),
    "no copies in groups of one": Mend(before=_copy_in_groups_of_one),
}
