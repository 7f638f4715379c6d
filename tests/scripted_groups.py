"""Groups of a scripted engine: there at once, the last prompt's first."""

from collections.abc import Callable, Sequence

from tepo_megatron.base.types import Prompt, Rollout, SamplingParams


class ScriptedGroups:
    """A `GroupStream` whose groups are complete at once; the last prompt's group comes first.

    Attributes:
        there: Groups that `next` has not returned yet; it returns the last one first.
    """

    def __init__(self, generate: Callable[[Sequence[Prompt], SamplingParams, int], list[Rollout]]) -> None:
        self._generate = generate
        self.there: list[list[Rollout]] = []

    def add(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> None:
        rollouts = self._generate(prompts, sampling, seed)
        n = sampling.samples
        self.there += [rollouts[i * n : (i + 1) * n] for i in range(len(prompts))]

    def next(self) -> list[Rollout] | None:
        return self.there.pop() if self.there else None

    def close(self) -> None:
        self.there = []
