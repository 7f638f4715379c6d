"""Recorded rollouts in the place of an engine: to train without servers, and to debug a step repeatedly."""

from __future__ import annotations

from pathlib import Path

from tepo_megatron.errors import DataError
from tepo_megatron.observability.metrics import Metrics
from tepo_megatron.observability.timing import Clock
from tepo_megatron.rollout import record
from tepo_megatron.types import Rollout, Routing


class Replay:
    """Returns the recorded rollouts of each step.

    Args:
        folder: Folder of `record.write`.
        routing: The model's routing, if each rollout must have recorded expert choices. None: they are not needed.
    """

    def __init__(self, folder: Path, routing: Routing | None = None) -> None:
        self._folder, self._routing = folder, routing

    def collect(self, step: int, clock: Clock) -> tuple[list[Rollout], Metrics]:
        """Return the step's graded rollouts and their metrics.

        Args:
            step: Number of the step.
            clock: The time is measured as phase "rollout".

        Raises:
            DataError: A file is missing or damaged, or its experts are missing or of another model.
        """
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
