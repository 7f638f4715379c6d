"""What the forward pass keeps for backward, tensor by tensor.

Every term is what one layer keeps for one token on one rank. A term's `module` is what a recomputation would have to cover to be
rid of it. With Transformer Engine (`attention="te"`) the same tensors are kept but for copies that only the SDPA path makes; that
was never run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo_megatron.config import ParallelConfig
from tepo_megatron.weights.ops import Architecture

Recompute = Literal["none", "selective", "full"]
Attention = Literal["sdpa", "te"]
Module = Literal["layernorm", "core_attn", "mlp", "rest"]
# what is computed again in backward: Megatron-Core's recompute_granularity, `selective` with its default module
RECOMPUTED: dict[Recompute, frozenset[Module]] = {
    "none": frozenset(),
    "selective": frozenset({"core_attn"}),
    "full": frozenset({"layernorm", "core_attn", "mlp", "rest"}),
}
FP32, INT64 = 4, 8


@dataclass(frozen=True)
class Term:
    """elements: of `size` bytes each (None: of an activation)."""

    what: str
    module: Module
    elements: float
    size: int | None = None

    def bytes(self, element_size: int) -> float:
        """For activations of `element_size` bytes."""
        return self.elements * (element_size if self.size is None else self.size)


def layer_terms(arch: Architecture, parallel: ParallelConfig, sparse: bool, attention: Attention) -> list[Term]:
    """Of one layer, for one token of a rank's packed tokens. sparse: with experts."""
    tp = parallel.tp
    hidden = arch.hidden_size / (tp if parallel.sequence_parallel else 1)
    queries, keys = arch.num_heads * arch.head_dim / tp, arch.num_query_groups * arch.head_dim / tp
    qkv, everybody = queries + 2 * keys, parallel.cp
    terms = [
        Term("input of the first norm", "rest", hidden),
        Term("its output, input of q, k, v", "layernorm", hidden),
        Term("queries, keys, values that attention reads", "rest", queries + 2 * keys * everybody),
        Term("output of attention", "core_attn" if attention == "sdpa" else "rest", queries),
        Term("its log-sum-exp", "core_attn", arch.num_heads / tp, FP32),
        Term("input of the second norm", "rest", hidden),
        Term("its output, input of the feed-forward block", "layernorm", hidden),
        Term("scales of the norms", "layernorm", 2 * hidden / arch.hidden_size, FP32),
    ]
    if attention == "sdpa":  # taken out of the padded buckets
        terms.append(Term("input of the output projection", "rest", queries))
    if arch.qk_norm:
        terms.append(Term("queries and keys before their norms", "rest", qkv if attention == "sdpa" else queries + keys))
        terms.append(Term("their scales", "layernorm", (arch.num_heads + arch.num_query_groups) / tp, FP32))
    if sparse and arch.experts is not None:
        return terms + _expert_terms(arch, parallel)
    ffn = arch.ffn_size / tp
    return [
        *terms,
        Term("gate and up projections", "mlp", 2 * ffn),
        Term("the gate's activation", "mlp", ffn),
        Term("its product with up", "mlp", ffn),
    ]


def _expert_terms(arch: Architecture, parallel: ParallelConfig) -> list[Term]:
    assert arch.experts is not None
    chosen, ffn = arch.experts.per_token, arch.experts.ffn_size / parallel.tp
    # the experts of a rank see the tokens of its whole tensor-parallel group, and of its expert-parallel one on average
    gathered = arch.hidden_size
    return [
        Term("router: logits, scores, choice", "mlp", 3 * arch.experts.number / parallel.tp, FP32),
        Term("tokens as they reach the experts", "mlp", chosen * gathered),
        Term("gate and up projections", "mlp", 2 * chosen * ffn),
        Term("the gate's activation", "mlp", chosen * ffn),
        Term("its product with up", "mlp", chosen * ffn),
        Term("outputs of the experts, before their weights", "mlp", chosen * gathered),
    ]


def layer_bytes(
    arch: Architecture,
    parallel: ParallelConfig,
    element_size: int,
    recompute: Recompute = "none",
    attention: Attention = "te",
    *,
    sparse: bool = False,
) -> float:
    """Bytes that one layer keeps for one token; under `full` its input alone."""
    terms = layer_terms(arch, parallel, sparse, attention)
    if recompute == "full":
        return terms[0].bytes(element_size)
    return sum(t.bytes(element_size) for t in terms if t.module not in RECOMPUTED[recompute])


def output_bytes(
    arch: Architecture, parallel: ParallelConfig, rows: int, element_size: int, logits_budget: int | None
) -> tuple[float, float]:
    """(kept, needed for a while) for `rows` rows of the output layer on the last stage.

    logits_budget: bytes (`training.logits_budget_mib`); None: all logits are there at once, and their gradient takes their
    place. Beside them: the rows' hidden states, and statistics of each row.
    """
    vocabulary = -(-arch.vocab_size // (16 * parallel.tp)) * 16
    logits = rows * vocabulary * element_size
    hidden = rows * arch.hidden_size * element_size
    row = rows * (5 * FP32 + 2 * INT64)
    if logits_budget is None:
        return logits + hidden + row, hidden
    chunk, piece = 1024 * vocabulary * element_size, 4096 * arch.hidden_size * FP32
    return min(logits, logits_budget) + hidden + row, chunk + hidden + 2 * piece


def microbatches_in_flight(parallel: ParallelConfig, pp_rank: int) -> float:
    """Microbatches of a whole stage whose activations a rank keeps at once, at most.

    One-forward-one-backward: stages behind it, and one. Interleaved (arXiv 2104.04473): chunks that run before the first
    backward, in units of a stage.
    """
    if parallel.vpp == 1:
        return float(parallel.pp - pp_rank)
    chunks = (parallel.vpp - 1) * parallel.pp + 2 * (parallel.pp - pp_rank - 1) + 1
    return chunks / parallel.vpp
