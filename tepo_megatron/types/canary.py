"""Token sequences whose log-probs tell which weights a server has."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Canaries:
    """Fixed sequences that actor and servers score at temperature 1 over the whole vocabulary.

    The target tokens are all tokens except the first of each sequence, sequence after sequence (suffix _N).

    Attributes:
        sequences: Token ids of each sequence, at least two tokens.
        cached_from: For each sequence, index of the first token that servers also score after a cached prefix, at least 1.
    """

    sequences: tuple[tuple[int, ...], ...]
    cached_from: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Return N, the number of target tokens."""
        return sum(len(ids) - 1 for ids in self.sequences)

    @cached_property
    def first_targets(self) -> tuple[int, ...]:
        """Return the index in the _N arrays of the first target of each sequence."""
        starts = np.cumsum([0, *(len(ids) - 1 for ids in self.sequences)])
        return tuple(int(start) for start in starts[:-1])

    @cached_property
    def sequence_N(self) -> NDArray[np.int64]:
        """Return the sequence of each target."""
        return np.repeat(np.arange(len(self.sequences)), [len(ids) - 1 for ids in self.sequences])

    def target(self, sequence: int, token: int) -> int:
        """Return the index in the _N arrays of one token."""
        return self.first_targets[sequence] + token - 1


@dataclass(frozen=True)
class CanaryAnswer:
    """Log-probs of the canaries under the weights of one server, fp64 nats.

    Attributes:
        logprobs_N: Of every target, computed without the prefix cache.
        cached_M: Of some targets, computed after a prefix that the server may have in its cache.
        targets_M: Index in `logprobs_N` of each of these targets.
    """

    logprobs_N: NDArray[np.float64]
    cached_M: NDArray[np.float64]
    targets_M: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.cached_M.shape != self.targets_M.shape:
            raise ValueError(f"{self.cached_M.size} log-probs of {self.targets_M.size} targets after a cached prefix")
