"""The reference policy: keep its weights in host memory, and swap them in for a forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tepo_megatron.platform.host_memory import HostArena


class HostWeights:
    """A copy of parameters in host memory (`arena`)."""

    def __init__(self, parameters: Sequence[Tensor], kept: Sequence[Tensor], arena: HostArena) -> None:
        self._parameters, self._kept, self.arena = parameters, kept, arena

    @classmethod
    def copied(cls, parameters: Sequence[Tensor]) -> "HostWeights":
        """Return a copy of the current values of the parameters."""
        arena = HostArena(parameters[0].device if parameters else torch.device("cpu"))
        pieces = arena.pieces([p.nbytes for p in parameters])
        kept = [piece.view(p.dtype).view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
        copy = cls(parameters, kept, arena)
        copy.capture()
        return copy

    @torch.no_grad()
    def capture(self) -> None:
        """Copy the current values of the parameters over the kept ones."""
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            kept.copy_(parameter.detach())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the kept values into the parameters within the context, and swap them back afterwards, bit for bit.

        Device memory beyond the parameters: a copy of one parameter at a time.
        """
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap parameters and kept values."""
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            current = parameter.detach().clone()
            parameter.copy_(kept)
            kept.copy_(current)
