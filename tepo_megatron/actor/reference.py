"""The reference policy: its weights wait in host memory and take the policy's place for a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class HostWeights:
    """A copy, in host memory, of what some parameters held when it was made."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._kept = [_to_host(p) for p in parameters]

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


def _to_host(x: Tensor) -> Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return host.copy_(x.detach())
