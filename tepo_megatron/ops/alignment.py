"""Padding of packed sequences, as the mesh requires it. It imports no torch, because `tepo plan` runs without."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Alignment:
    """The padding that the mesh requires of packed sequences and microbatches."""

    cp: int = 1
    # The tokens of a microbatch on one context-parallel rank are padded to a multiple of this: tp under sequence parallelism,
    # times 16 or 128 in FP8
    total: int = 1
    # Minimum tokens of a microbatch over all context-parallel ranks. If no microbatch is planned with more, all have the same
    # length. 0: no minimum.
    fixed: int = 0

    @property
    def sequence(self) -> int:
        """Return the multiple to which each sequence is padded, over all context-parallel ranks: 2 cp, its zigzag chunks."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def step(self) -> int:
        """Return the multiple to which a microbatch is padded, in tokens over all context-parallel ranks."""
        return math.lcm(self.sequence, self.cp * self.total)

    def padded_one(self, length: int) -> int:
        """Return the length of one sequence with its own padding, in tokens over all context-parallel ranks."""
        return -(-length // self.sequence) * self.sequence

    def capacity(self, max_tokens: int) -> int:
        """Return how many tokens of padded sequences fit into a microbatch of `max_tokens`, whose total is padded too.

        At least 1.
        """
        return max(1, max_tokens // self.step * self.step)

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """Return the padded lengths over all context-parallel ranks. The last sequence gets the padding of the total."""
        out = [self.padded_one(n) for n in lengths]
        out[-1] += -(-max(sum(out), self.fixed) // self.step) * self.step - sum(out)
        return out
