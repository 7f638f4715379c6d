"""Keep what may be needed again of the steps whose rollouts the service has collected.

A checkpoint needs the position in the prompts after a step. Ranks that are restarted take the steps after the checkpoint again:
they get the same batches, and the decisions on them are logged again, after the line of the new start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.controller.batch_memory import BatchMemory
from tepo_megatron.rollout import decisions


@dataclass(frozen=True)
class _Step:
    paths: Sequence[str]  # of the batch, or of its minibatches, in `BatchMemory`
    line: str  # of decisions.jsonl; empty if the rollouts are another run's
    position: Mapping[str, Any] | None  # in the prompt stream, after the step


class KeptSteps:
    """The collected steps that may be needed again.

    `keeps_batches`: whether a batch is kept until a checkpoint contains its step. False: until all ranks have read it.
    """

    def __init__(self, run_dir: Path, memory: BatchMemory, staleness: int) -> None:
        self._run_dir, self._memory, self._staleness = run_dir, memory, staleness
        self._steps: dict[int, _Step] = {}
        self.keeps_batches, self.released_until = False, 0

    def add(self, step: int, paths: Sequence[str], line: str, position: Mapping[str, Any] | None) -> None:
        """Add a step that was collected."""
        self._steps[step] = _Step(paths, line, position)
        if not self.keeps_batches:
            oldest = step - 1 - self._staleness
            self._steps = {number: kept for number, kept in self._steps.items() if number >= oldest}

    def position(self, step: int) -> Mapping[str, Any] | None:
        """Return the position in the prompt stream after a step; None if the step was not collected here."""
        return self._steps[step].position if step in self._steps else None

    def repeat_line(self, step: int) -> None:
        """Log the decisions on a step again, if it was collected already."""
        if step in self._steps and self._steps[step].line:
            decisions.append(self._run_dir, self._steps[step].line)

    def release_batch(self, path: str) -> None:
        """Release a batch that all ranks have read, unless it is kept."""
        if not self.keeps_batches:
            self._memory.release(path)

    def release_until(self, step: int) -> None:
        """Release the batches of the steps that a complete checkpoint contains."""
        self.released_until = max(step, self.released_until)
        for number in [number for number in self._steps if number <= step]:
            for path in self._steps.pop(number).paths:
                self._memory.release(path)
