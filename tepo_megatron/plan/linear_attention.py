"""Count what a layer with the gated delta rule computes, keeps for backward, and caches in an engine.

PyTorch's path (`ops/gated_delta_rule.py`), which a CPU uses, was measured. GPUs are assumed to have FLA and causal-conv1d,
which keep their inputs and outputs and one triangular matrix per chunk, with PyTorch's norms around them. That was never run.
"""

from tepo_megatron.config import ParallelConfig
from tepo_megatron.plan.kept import FP32, ActivationTerm
from tepo_megatron.weights.ops import Architecture, LinearAttention

CHUNK = 64  # tokens of a chunk, in both paths


def linear_terms(arch: Architecture, parallel: ParallelConfig, fused: bool, sequence: int) -> list[ActivationTerm]:
    """Return the terms of one layer between its input projection and its output projection, for one token of a rank.

    Context-parallel ranks have a part of the heads for all tokens, which is as much.
    """
    linear, tp = _linear(arch), parallel.tp
    heads, key_heads = linear.value_heads / tp, linear.key_heads / tp
    channels, keys, values = sum(linear.convolved) / tp, heads * linear.key_dim, heads * linear.value_dim
    terms = [
        ActivationTerm("scales of the norms of queries and keys", "rest", 2 * key_heads, FP32),
        ActivationTerm("decays and write strengths", "rest", 3 * heads, FP32),
        ActivationTerm("output of the gated delta rule", "rest", values, FP32),
        ActivationTerm("its norm, with and without weights, and scales", "rest", 2 * values + heads, FP32),
        ActivationTerm("output gates before and after SiLU", "rest", 2 * values, FP32),
        ActivationTerm("input of the output projection", "rest", values),
    ]
    if fused:
        return [
            *terms,
            ActivationTerm("channels before and after the convolution", "rest", 2 * channels),
            ActivationTerm("queries and keys before their norms", "rest", 2 * key_heads * linear.key_dim, FP32),
            ActivationTerm("queries, keys and values", "rest", 2 * keys + values),
            ActivationTerm("triangular matrices of the chunks", "rest", CHUNK * heads),
        ]
    padded = 1 + CHUNK / 2 / sequence if sequence else 1.0
    later = 1 - CHUNK / sequence if sequence > CHUNK else 0.0  # share of chunks that begin with a state
    state = linear.key_dim * linear.value_dim * heads / CHUNK
    return [
        *terms,
        ActivationTerm("inputs of the convolution, shifted", "rest", linear.conv_width * channels, FP32),
        ActivationTerm("its output before and after SiLU", "rest", 2 * channels, FP32),
        ActivationTerm("queries and keys", "rest", 2 * keys, FP32),
        ActivationTerm("queries and keys in chunks, as products need them", "rest", 8 * padded * keys, FP32),
        ActivationTerm("values in chunks", "rest", padded * values, FP32),
        ActivationTerm("solution of the chunks", "rest", padded * (keys + values), FP32),
        ActivationTerm("matrices of the chunks", "rest", 5 * padded * CHUNK * heads, FP32),
        ActivationTerm("decays of the chunks", "rest", 4 * padded * heads, FP32),
        ActivationTerm("states before chunks, and what is read and written", "rest", later * (state + keys + values), FP32),
    ]


def projection_operations(arch: Architecture) -> float:
    """Return the operations of the two projections for one token in forward."""
    linear = _linear(arch)
    return 2.0 * arch.hidden_size * (sum(linear.projected) + linear.value_heads * linear.value_dim)


def delta_rule_operations(arch: Architecture) -> float:
    """Return the operations of the chunked rule and the convolution for one token in forward, whatever the sequence's length.

    Of each head: two products of keys or queries with the chunk's keys, the triangular system, the chunk's own values, and
    three products with the state.
    """
    linear = _linear(arch)
    k, v = linear.key_dim, linear.value_dim
    head = 4 * CHUNK * k + CHUNK * (k + v) + 2 * CHUNK * v + 6 * k * v
    return float(linear.value_heads * head + 2 * linear.conv_width * sum(linear.convolved))


def moved_elements(arch: Architecture, tp: int) -> float:
    """Return the elements that a token moves between the two projections in forward, with a kernel for each part.

    The convolution and the norms of queries and keys read and write once; the rule reads its inputs and writes its output; the
    gated norm reads two tensors and writes one.
    """
    linear = _linear(arch)
    keys, values = linear.value_heads * linear.key_dim, linear.value_heads * linear.value_dim
    return (2 * sum(linear.convolved) + 6 * keys + 5 * values) / tp


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


def _linear(arch: Architecture) -> LinearAttention:
    assert arch.linear_attention is not None
    return arch.linear_attention
