"""The order of the conversations over passes and updates. It depends on the seed alone, so a resume needs a step alone."""

from dataclasses import dataclass

import torch

from tepo_megatron.utils.seeding import derive_seed


@dataclass(frozen=True)
class TrainingPlan:
    """Which conversations each update learns from.

    Attributes:
        per_update: Conversations of an update; the last one of a pass may have fewer.
        epochs: Passes over the conversations, each in another order.
        limit: Most updates; None: no limit.
    """

    conversations: int
    per_update: int
    epochs: int
    limit: int | None
    seed: int

    @property
    def updates_per_epoch(self) -> int:
        """Return the number of updates of a whole pass."""
        return -(-self.conversations // self.per_update)

    @property
    def steps(self) -> int:
        """Return the number of updates of the run."""
        every = self.epochs * self.updates_per_epoch
        return every if self.limit is None else min(self.limit, every)

    def indices(self, step: int) -> list[int]:
        """Return the conversations of an update."""
        epoch, update = divmod(step - 1, self.updates_per_epoch)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "sft", epoch))
        order = torch.randperm(self.conversations, generator=generator).tolist()
        return order[update * self.per_update : (update + 1) * self.per_update]
