"""Recorded rollouts in the place of an engine: for training alone, and for debugging a step again and again."""

from __future__ import annotations

from pathlib import Path

from tepo_megatron.metrics import Metrics
from tepo_megatron.rollout import record
from tepo_megatron.timing import Clock
from tepo_megatron.types import Rollout


class Replay:
    """Gives each step what was recorded of it. folder: of `record.write`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self, step: int, clock: Clock) -> tuple[list[Rollout], Metrics]:
        """The step's graded rollouts and their metrics. Raises DataError naming the file that is missing or damaged."""
        with clock.phase("rollout"):
            return record.read(self._folder, step)
