"""One kind of tensor that a layer keeps for backward."""

from dataclasses import dataclass
from typing import Literal

Module = Literal["mlp", "rest"]
FP32 = 4  # bytes


@dataclass(frozen=True)
class ActivationTerm:
    """One kind of tensor that a layer keeps for backward, per token.

    Attributes:
        module: Part of the layer that `recompute` would have to run again.
        size: Bytes per element. None: those of an activation.
        saved: Number of elements saved for backward, counted once per saving operation. None: `elements`.
    """

    what: str
    module: Module
    elements: float
    size: int | None = None
    saved: float | None = None

    def bytes(self, element_size: int) -> float:
        """Return its bytes for activations of `element_size` bytes."""
        return self.elements * self._size(element_size)

    def copied(self, element_size: int) -> float:
        """Return the bytes of its copies in host memory."""
        return (self.elements if self.saved is None else self.saved) * self._size(element_size)

    def _size(self, element_size: int) -> int:
        return element_size if self.size is None else self.size
