"""Data objects of the memory predictions: a model with its way of computing, and the memory of a GPU in one state."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tepo_megatron.doctor.plan.activations import PlannedKernels, Recompute
from tepo_megatron.models.families import Family
from tepo_megatron.models.ops import Architecture

ELEMENT: Mapping[str, int] = {"fp32": 4, "bf16": 2}  # bytes


@dataclass(frozen=True)
class PlannedModel:
    """The trained model and its way of computing."""

    family: Family
    arch: Architecture
    element: int = 2  # bytes of a weight and of an activation
    recompute: Recompute = "none"  # `training.recompute`
    kernels: PlannedKernels = field(default_factory=PlannedKernels)


@dataclass(frozen=True)
class MemoryState:
    """Memory of one GPU at the fullest moment of a state."""

    name: str  # train, sync or generate
    parts: Mapping[str, float]  # component -> bytes

    @property
    def total(self) -> float:
        """Return the bytes of all components."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """Return the component with the most bytes."""
        return max(self.parts, key=lambda part: self.parts[part])
