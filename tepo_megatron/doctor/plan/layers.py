"""The kinds of a model's layers, and what one with the gated delta rule computes and caches."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tepo_megatron.models.ops import Architecture, LinearAttention

CHUNK = 64  # tokens of a chunk of the gated delta rule
FP32 = 4  # bytes


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer."""

    sparse: bool = False
    linear: bool = False  # the layer has the gated delta rule in place of attention


DENSE = LayerKind()


def kinds_of(arch: Architecture, layers: Iterable[int] | None = None) -> Counter[LayerKind]:
    """Return the number of layers of each kind. `layers`: indices of layers in the whole model. None: all."""
    chosen = range(arch.num_layers) if layers is None else layers
    return Counter(LayerKind(layer in arch.sparse_layers, layer in arch.linear_layers) for layer in chosen)


def attention_layers(arch: Architecture) -> int:
    """Return the number of layers with attention, which have a KV cache."""
    return arch.num_layers - len(arch.linear_layers)


def projection_operations(arch: Architecture) -> float:
    """Return the operations of the two projections for one token in forward."""
    linear = linear_of(arch)
    return 2.0 * arch.hidden_size * (sum(linear.projected) + linear.value_heads * linear.value_dim)


def delta_rule_operations(arch: Architecture) -> float:
    """Return the operations of the chunked rule and the convolution for one token in forward, whatever the sequence's length.

    Of each head: two products of keys or queries with the chunk's keys, the triangular system, the chunk's own values, and
    three products with the state.
    """
    linear = linear_of(arch)
    k, v = linear.key_dim, linear.value_dim
    head = 4 * CHUNK * k + CHUNK * (k + v) + 2 * CHUNK * v + 6 * k * v
    return float(linear.value_heads * head + 2 * linear.conv_width * sum(linear.convolved))


def sequence_state_bytes(arch: Architecture, tp: int, element: int = 2) -> float:
    """Return the bytes that an engine keeps for each sequence on each GPU, whatever its length; 0 without linear attention.

    The state of the rule is fp32 (`mamba_ssm_dtype` in config.json), and that of the convolution has the model's type.

    Args:
        tp, element: GPUs of the engine, and bytes of an element of the model.
    """
    if arch.linear_attention is None:
        return 0.0
    linear = arch.linear_attention
    state = linear.value_heads * linear.key_dim * linear.value_dim * FP32
    convolution = sum(linear.convolved) * (linear.conv_width - 1) * element
    return len(linear.layers) * (state + convolution) / tp


def linear_of(arch: Architecture) -> LinearAttention:
    """Return the sizes of the layers with the gated delta rule, which the model must have."""
    assert arch.linear_attention is not None
    return arch.linear_attention
