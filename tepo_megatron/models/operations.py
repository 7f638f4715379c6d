"""The floating-point operations that a model needs, for the utilization of GPUs (MFU)."""

from collections.abc import Iterable

from tepo_megatron.models.ops import Architecture


def forward_operations(arch: Architecture, lengths: Iterable[tuple[int, int]]) -> float | None:
    """Return the operations of a forward pass over sequences: the sum of 2 P L + 2 V h R + 2 H D L^2 layers.

    P parameters that a token meets in the layers (of experts those that it is sent to), vocabulary V, hidden size h, H heads of
    D channels; causal attention counts the half of all scores. None: layers with the gated delta rule are not counted.

    Args:
        lengths: (L, R) of each sequence: all its tokens, and those whose rows reach the output layer.
    """
    if arch.linear_layers:
        return None
    heads = (2 + arch.attention_output_gate) * arch.num_heads + 2 * arch.num_query_groups
    attention, sparse = arch.hidden_size * arch.head_dim * heads, len(arch.sparse_layers)
    ffn = (arch.num_layers - sparse) * arch.ffn_size
    ffn += sparse * arch.experts.ffn_size * arch.experts.per_token if arch.experts else 0
    parameters = arch.num_layers * attention + 3 * arch.hidden_size * ffn
    scores = 2 * arch.num_heads * arch.head_dim * arch.num_layers
    output = 2 * arch.vocab_size * arch.hidden_size
    return float(sum(2 * parameters * length + output * rows + scores * length**2 for length, rows in lengths))
