"""The reference policy: its weights wait in host memory and take the policy's place for a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tepo_megatron.platform.host_memory import HostArena


class HostWeights:
    """A copy, in host memory, of what some parameters held when it was made. arena: the memory."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self.arena = HostArena(parameters[0].device if parameters else torch.device("cpu"))
        pieces = self.arena.pieces([p.nbytes for p in parameters])
        self._kept = [piece.view(p.dtype).view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what the parameters hold now, in the place of what was kept before."""
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            kept.copy_(parameter.detach())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the parameters hold the kept values; afterwards, bit for bit, their own again.

        Device memory beyond the parameters: one of them at a time.
        """
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Parameters and kept values change places."""
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            current = parameter.detach().clone()
            parameter.copy_(kept)
            kept.copy_(current)
