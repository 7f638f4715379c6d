"""Recorded rollouts in the place of an engine: for training alone, and for debugging a step again and again."""

from __future__ import annotations

from pathlib import Path

from tepo_megatron.errors import DataError
from tepo_megatron.metrics import Metrics
from tepo_megatron.rollout import record
from tepo_megatron.timing import Clock
from tepo_megatron.types import Rollout, Routing


class Replay:
    """Gives each step what was recorded of it. folder: of `record.write`; routing: of the model, if each rollout must have the
    experts that were chosen.
    """

    def __init__(self, folder: Path, routing: Routing | None = None) -> None:
        self._folder, self._routing = folder, routing

    def collect(self, step: int, clock: Clock) -> tuple[list[Rollout], Metrics]:
        """The step's graded rollouts and their metrics. Raises DataError naming the file that is missing or damaged."""
        with clock.phase("rollout"):
            rollouts, metrics = record.read(self._folder, step)
            for rollout in rollouts if self._routing is not None else ():
                self._check(rollout, step)
            return rollouts, metrics

    def _check(self, rollout: Rollout, step: int) -> None:
        file, routing = record.file_of(self._folder, step), self._routing
        assert routing is not None
        if rollout.experts_LKT is None:
            raise DataError(
                f"{file}: recorded without experts; record it with rollout.replay_experts=true, or set that to false"
            )
        try:
            routing.check(rollout.experts_LKT)
        except ValueError as e:
            raise DataError(f"{file}: prompt {rollout.prompt_id} was sampled by another model ({e})") from None
