"""The kinds of a model's layers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tepo_megatron.weights.ops import Architecture


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer.

    Attributes:
        linear: The layer has the gated delta rule in place of attention.
    """

    sparse: bool = False
    linear: bool = False


DENSE = LayerKind()


def kinds_of(arch: Architecture, layers: Iterable[int] | None = None) -> Counter[LayerKind]:
    """Return the number of layers of each kind.

    Args:
        layers: Indices of layers in the whole model. None: all.
    """
    chosen = range(arch.num_layers) if layers is None else layers
    return Counter(LayerKind(layer in arch.sparse_layers, layer in arch.linear_layers) for layer in chosen)


def attention_layers(arch: Architecture) -> int:
    """Return the number of layers with attention, which have a KV cache."""
    return arch.num_layers - len(arch.linear_layers)
