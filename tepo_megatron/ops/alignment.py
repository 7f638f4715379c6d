"""What the mesh asks of the lengths of packed sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Alignment:
    """What the mesh asks of packed lengths.

    sequence: every sequence is padded to a multiple of it (2 cp: the zigzag halves); total: the tokens of a context-parallel
    rank are a multiple of it (tp under sequence parallelism).
    """

    cp: int = 1
    total: int = 1

    @property
    def sequence(self) -> int:
        """Padding of one sequence, in tokens over all context-parallel ranks."""
        return 2 * self.cp if self.cp > 1 else 1

    def padded_one(self, length: int) -> int:
        """A sequence's tokens with its own padding."""
        return -(-length // self.sequence) * self.sequence

    def room(self, max_tokens: int) -> int:
        """Tokens of padded sequences that fit into a microbatch of `max_tokens`, whose total is padded too; at least 1."""
        step = math.lcm(self.sequence, self.cp * self.total)
        return max(1, max_tokens // step * step)

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """Padded lengths over all context-parallel ranks; the last sequence takes up what the total needs."""
        out = [self.padded_one(n) for n in lengths]
        while (sum(out) // self.cp) % self.total:
            out[-1] += self.sequence
        return out
