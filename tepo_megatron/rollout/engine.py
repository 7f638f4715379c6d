"""What the training loop knows of an inference engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tepo_megatron.types import Prompt, Rollout, SamplingParams

# The version of an engine that still serves the weights of its model directory.
INITIAL_VERSION = -1


class RolloutEngine(Protocol):
    """An inference server owned by this process. Used by one caller at a time.

    `with engine:` closes it on the way out, whatever happened; `start` it inside.
    """

    @property
    def version(self) -> int:
        """The version of the weights last accepted by `update_weights`; before the first, INITIAL_VERSION."""
        ...

    def start(self) -> None:
        """Start the server and return at once, so that the actor can be built meanwhile. Raises RolloutError."""
        ...

    def wait_ready(self) -> None:
        """Return when the server takes requests. Raises RolloutError if it dies or is not ready in time."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """`sampling.samples` responses to each prompt, ungraded: groups contiguous, in the order of the prompts.

        The samples of a prompt depend on (weights, prompt, sampling, seed) alone, not on what else is sampled with it.
        rollout_logprobs are those of the distribution sampled from (after temperature). Raises RolloutError.
        """
        ...

    def update_weights(self, files: Sequence[Path], version: int) -> None:
        """Serve the weights in `files` (safetensors, Hugging Face names; together the whole model, each tensor once).

        Returns when the new weights serve and no cache of the old ones is left; the files may then be deleted.
        Raises SyncError, after which the engine can only be closed.
        """
        ...

    def close(self) -> None:
        """End the server and every process it started; bounded in time, may be called again."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
