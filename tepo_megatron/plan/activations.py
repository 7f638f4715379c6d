"""What the forward pass keeps for backward, tensor by tensor.

Every term is what one layer keeps for one token on one rank. A term's `module` is what would have to be computed again for it
not to be kept. With Transformer Engine (`attention="te"`) the same tensors are taken to be kept but for copies that only the
SDPA path makes; that was never run.
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


@dataclass(frozen=True)
class Kernels:
    """attention: as `model.attention`; fused_norms: they keep their input and one scale a row. PyTorch's on a CPU do not: they
    keep two vectors in fp32.
    """

    attention: Attention = "te"
    fused_norms: bool = True


ON_CPU = Kernels("sdpa", False)
ON_CUDA = Kernels()


def layer_terms(arch: Architecture, parallel: ParallelConfig, sparse: bool, kernels: Kernels, sequence: int) -> list[Term]:
    """Of one layer, for one token of a rank's packed tokens. sparse: with experts; sequence: tokens of a sequence."""
    tp, cp = parallel.tp, parallel.cp
    hidden = arch.hidden_size / (tp if parallel.sequence_parallel else 1)
    queries, keys = arch.num_heads * arch.head_dim / tp, arch.num_query_groups * arch.head_dim / tp
    terms = [
        *_norm("the first norm", hidden, hidden / arch.hidden_size, kernels),
        Term("input of q, k, v", "layernorm", hidden),
        Term("queries, turned", "rest", queries),
        # values are a view of all three, which so stay; gathered over cp they are a copy
        *(_one("keys, turned", keys) + _one("q, k, v", queries + 2 * keys) if cp == 1 else _one("k, v of all", 2 * keys * cp)),
        Term("output of attention", "core_attn" if kernels.attention == "sdpa" else "rest", queries),
        Term("log-sum-exp of its scores", "core_attn", arch.num_heads / tp, FP32),
        *_norm("the second norm", hidden, hidden / arch.hidden_size, kernels),
        Term("input of the feed-forward block", "layernorm", hidden),
    ]
    if kernels.attention == "sdpa":
        terms.append(Term("queries in buckets", "core_attn", queries))
        terms.append(Term("keys and values in buckets", "core_attn", 2 * keys * cp))
        terms.append(Term("input of the output projection", "rest", queries))
        if cp > 1:
            terms.append(Term("which keys a query sees", "core_attn", sequence / 2))
    if arch.qk_norm:
        if cp > 1 or not kernels.fused_norms:
            terms += _norm(
                "the norms of queries and keys", queries + keys, (arch.num_heads + arch.num_query_groups) / tp, kernels
            )
        else:  # their input is a view of what is kept anyway
            terms.append(Term("scales of their norms", "rest", (arch.num_heads + arch.num_query_groups) / tp, FP32))
    if sparse:
        return terms + _expert_terms(arch, parallel, hidden)
    ffn = arch.ffn_size / tp
    return [*terms, *_swiglu(ffn)]


def _one(what: str, elements: float) -> list[Term]:
    return [Term(what, "rest", elements)]


def _norm(what: str, size: float, rows: float, kernels: Kernels) -> list[Term]:
    """An RMS norm of vectors of together `size` elements, `rows` of them."""
    scale = Term(f"scale of {what}", "rest", rows, FP32)
    if kernels.fused_norms:
        return [Term(f"input of {what}", "rest", size), scale]
    return [Term(f"{what}, in fp32", "rest", 2 * size, FP32), scale]


def _swiglu(ffn: float) -> list[Term]:
    return [
        Term("gate and up projections", "mlp", 2 * ffn),
        Term("the gate's activation", "mlp", ffn),
        Term("up, offset by 0", "mlp", ffn),  # Megatron-Core 0.16: glu_linear_offset
        Term("their product", "mlp", ffn),
    ]


def _expert_terms(arch: Architecture, parallel: ParallelConfig, hidden: float) -> list[Term]:
    """With balanced experts: of a rank's tokens per_token copies reach experts, wherever those are."""
    assert arch.experts is not None
    chosen, ffn, number = arch.experts.per_token, arch.experts.ffn_size / parallel.tp, arch.experts.number
    tokens = hidden / arch.hidden_size  # of a token that this rank routes
    return [
        Term("router: logits and scores", "mlp", 2 * tokens * number, FP32),
        Term("router: which were chosen", "mlp", tokens * number, 1),
        Term("tokens as they reach the experts", "mlp", chosen * arch.hidden_size),
        *_swiglu(chosen * ffn),
        Term("their products, weighted by the router", "mlp", chosen * ffn),
    ]


def layer_bytes(
    arch: Architecture,
    parallel: ParallelConfig,
    element_size: int,
    recompute: Recompute = "none",
    kernels: Kernels = ON_CUDA,
    *,
    sparse: bool = False,
    sequence: int = 0,
) -> float:
    """Bytes that one layer keeps for one token, of sequences of `sequence` tokens; under `full` its input alone."""
    hidden = arch.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    if recompute == "full":
        return hidden * element_size
    terms = layer_terms(arch, parallel, sparse, kernels, sequence)
    return sum(t.bytes(element_size) for t in terms if t.module not in RECOMPUTED[recompute])


def final_norm_bytes(arch: Architecture, parallel: ParallelConfig, element_size: int, kernels: Kernels = ON_CUDA) -> float:
    """Of one token, on the last stage."""
    hidden = arch.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    return sum(t.bytes(element_size) for t in _norm("the last norm", hidden, hidden / arch.hidden_size, kernels))


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
