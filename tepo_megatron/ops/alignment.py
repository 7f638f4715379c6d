"""What a mesh asks of the lengths of packed sequences. Without torch: plans are made where none is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Alignment:
    """What the mesh asks of packed lengths.

    sequence: every sequence is padded to a multiple of it (2 cp: the zigzag halves); total: the tokens of a context-parallel
    rank are a multiple of it (tp under sequence parallelism, times 16 or 128 in FP8); fixed: tokens over all context-parallel
    ranks that a microbatch has at least, so that all have the same where none is planned with more; 0: as many as it needs.
    """

    cp: int = 1
    total: int = 1
    fixed: int = 0

    @property
    def sequence(self) -> int:
        """Padding of one sequence, in tokens over all context-parallel ranks."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def step(self) -> int:
        """What the tokens of a microbatch are a multiple of, over all context-parallel ranks."""
        return math.lcm(self.sequence, self.cp * self.total)

    def padded_one(self, length: int) -> int:
        """A sequence's tokens with its own padding."""
        return -(-length // self.sequence) * self.sequence

    def room(self, max_tokens: int) -> int:
        """Tokens of padded sequences that fit into a microbatch of `max_tokens`, whose total is padded too; at least 1."""
        return max(1, max_tokens // self.step * self.step)

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """Padded lengths over all context-parallel ranks; the last sequence takes up what the total needs."""
        out = [self.padded_one(n) for n in lengths]
        out[-1] += -(-max(sum(out), self.fixed) // self.step) * self.step - sum(out)
        return out
