"""Count the tensors that the forward pass keeps for backward.

Every term is the memory that one layer keeps for one token on one rank. A term's `module` is the part of the layer that would
have to be recomputed if the tensor were not kept. Transformer Engine (`attention="te"`) is assumed to keep the same tensors,
without the copies that only the SDPA path makes; this was never run.

With `training.offload_activations` tensors of `LEAST_OFFLOADED` bytes or more are kept in host memory instead. Every operation
that saves a tensor makes its own copy of the part that it saves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tepo_megatron.base.hardware import LEAST_OFFLOADED
from tepo_megatron.config import ParallelConfig
from tepo_megatron.doctor.plan.parameters import CHUNK, DENSE, FP32, LayerKind, linear_of
from tepo_megatron.models.ops import Architecture

Module = Literal["mlp", "rest"]
Recompute = Literal["none", "selective", "full"]
Attention = Literal["sdpa", "te", "packed"]
# modules recomputed in backward (`training.recompute`); `full` keeps only a layer's input
RECOMPUTED: dict[Recompute, frozenset[Module]] = {
    "none": frozenset(),
    "selective": frozenset({"mlp"}),
    "full": frozenset({"mlp", "rest"}),
}
INT64 = 8


@dataclass(frozen=True)
class ActivationTerm:
    """One kind of tensor that a layer keeps for backward, per token."""

    what: str
    module: Module  # part of the layer that `recompute` would have to run again
    elements: float
    size: int | None = None  # bytes per element. None: those of an activation.
    saved: float | None = None  # number of elements saved for backward, counted once per saving operation. None: `elements`.

    def bytes(self, element_size: int) -> float:
        """Return its bytes for activations of `element_size` bytes."""
        return self.elements * self._size(element_size)

    def copied(self, element_size: int) -> float:
        """Return the bytes of its copies in host memory."""
        return (self.elements if self.saved is None else self.saved) * self._size(element_size)

    def _size(self, element_size: int) -> int:
        return element_size if self.size is None else self.size


@dataclass(frozen=True)
class PlannedKernels:
    """The kernels that determine what is kept."""

    # `te`: Transformer Engine's. `sdpa`: PyTorch's, in buckets. `packed`: a function that keeps no buckets, as for 16 bits on a
    # GPU and for shared prompts.
    attention: Attention = "te"
    # Fused norms keep their input and one scale per row. PyTorch's norms on a CPU keep two fp32 vectors instead.
    fused_norms: bool = True
    fused_delta_rule: bool = True  # FLA and causal-conv1d compute linear attention. PyTorch does otherwise, and keeps more.


ON_CPU = PlannedKernels("sdpa", False, False)
ON_CUDA = PlannedKernels()


def layer_terms(
    arch: Architecture, parallel: ParallelConfig, kind: LayerKind, kernels: PlannedKernels, sequence: int
) -> list[ActivationTerm]:
    """Return the terms of one layer without recomputation, for one packed token of a rank."""
    hidden = arch.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    terms = [
        *_norm("the first norm", hidden, hidden / arch.hidden_size, kernels),
        ActivationTerm("input of the first projection", "rest", hidden),
        *_norm("the second norm", hidden, hidden / arch.hidden_size, kernels),
        ActivationTerm("input of the feed-forward block", "rest", hidden),
    ]
    if kind.linear:
        terms += _linear_terms(arch, parallel, kernels.fused_delta_rule, sequence)
    else:
        terms += _attention_terms(arch, parallel, kernels, sequence)
    if kind.sparse:
        return terms + _expert_terms(arch, parallel, hidden)
    return [*terms, *_swiglu(arch.ffn_size / parallel.tp)]


def _attention_terms(
    arch: Architecture, parallel: ParallelConfig, kernels: PlannedKernels, sequence: int
) -> list[ActivationTerm]:
    """Return the terms of attention between its two projections."""
    tp, cp = parallel.tp, parallel.cp
    queries, keys = arch.num_heads * arch.head_dim / tp, arch.num_query_groups * arch.head_dim / tp
    terms = [
        ActivationTerm("queries, turned", "rest", queries),
        ActivationTerm("output of attention", "rest", queries),
        ActivationTerm("log-sum-exp of its scores", "rest", arch.num_heads / tp, FP32),
    ]
    if arch.attention_output_gate:
        terms.append(ActivationTerm("output gates", "rest", queries))
        terms.append(ActivationTerm("sigmoid of the output gates", "rest", queries, FP32))
        terms.append(ActivationTerm("gated output of attention", "rest", queries))
    if cp == 1:
        # the values are a view of q, k and v, so all three stay
        terms.append(ActivationTerm("keys, turned", "rest", keys))
        terms.append(ActivationTerm("q, k, v", "rest", queries + 2 * keys, saved=keys))
    else:
        terms.append(ActivationTerm("k, v of all", "rest", 2 * keys * cp))
    if kernels.attention == "sdpa":
        terms.append(ActivationTerm("queries in buckets", "rest", queries))
        terms.append(ActivationTerm("keys and values in buckets", "rest", 2 * keys * cp))
        terms.append(ActivationTerm("input of the output projection", "rest", queries))
        if cp > 1:
            terms.append(ActivationTerm("which keys a query sees", "rest", sequence / 2))
    if arch.qk_norm:
        heads = (arch.num_heads + arch.num_query_groups) / tp
        if cp > 1 or not kernels.fused_norms:
            terms += _norm("the norms of queries and keys", queries + keys, heads, kernels)
        else:  # their input is a view of a tensor that is kept anyway
            terms.append(ActivationTerm("scales of their norms", "rest", heads, FP32))
    return terms


def _linear_terms(arch: Architecture, parallel: ParallelConfig, fused: bool, sequence: int) -> list[ActivationTerm]:
    """Return the terms of one layer between its input projection and its output projection, for one token of a rank.

    Context-parallel ranks have a part of the heads for all tokens, which is as much.
    """
    linear, tp = linear_of(arch), parallel.tp
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


def _norm(what: str, size: float, rows: float, kernels: PlannedKernels) -> list[ActivationTerm]:
    """Return the terms of an RMS norm of `rows` vectors with `size` elements in total."""
    scale = ActivationTerm(f"scale of {what}", "rest", rows, FP32)
    if kernels.fused_norms:
        return [ActivationTerm(f"input of {what}", "rest", size), scale]
    return [
        ActivationTerm(f"input of {what}, in fp32", "rest", size, FP32, saved=2 * size),
        ActivationTerm(f"{what}, in fp32", "rest", size, FP32),
        scale,
    ]


def _swiglu(ffn: float) -> list[ActivationTerm]:
    return [
        ActivationTerm("gate and up projections", "mlp", 2 * ffn),  # SwiGLU is one function, which recomputes the rest
        ActivationTerm("their product", "mlp", ffn),
    ]


def _expert_terms(arch: Architecture, parallel: ParallelConfig, hidden: float) -> list[ActivationTerm]:
    """Return the terms of the experts, assuming balanced load: each token has `per_token` copies, on whichever rank."""
    assert arch.experts is not None
    chosen, ffn, number = arch.experts.per_token, arch.experts.ffn_size / parallel.tp, arch.experts.number
    tokens = hidden / arch.hidden_size  # share of a token that this rank routes
    return [
        ActivationTerm("router: logits and scores", "mlp", 2 * tokens * number, FP32),
        ActivationTerm("router: which were chosen", "mlp", tokens * number, 1),
        ActivationTerm("tokens as they reach the experts", "mlp", chosen * arch.hidden_size),
        *_swiglu(chosen * ffn),
    ]


@dataclass(frozen=True)
class SavedActivations:
    """Bytes kept for backward."""

    device: float
    host: float = 0.0


def kept(terms: Sequence[ActivationTerm], element_size: int, tokens: float = 1, *, offloaded: bool = False) -> SavedActivations:
    """Return the bytes that some tokens of a rank keep for backward."""
    away = [t for t in terms if offloaded and t.bytes(element_size) * tokens >= LEAST_OFFLOADED]
    stay = sum(t.bytes(element_size) for t in terms if t not in away)
    return SavedActivations(stay * tokens, sum(t.copied(element_size) for t in away) * tokens)


def kept_terms(
    arch: Architecture,
    parallel: ParallelConfig,
    recompute: Recompute = "none",
    kernels: PlannedKernels = ON_CUDA,
    *,
    kind: LayerKind = DENSE,
    sequence: int = 0,
) -> list[ActivationTerm]:
    """Return the terms that one layer keeps for one token; under `full` its input alone."""
    if recompute == "full":
        hidden = arch.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
        return [ActivationTerm("input of the layer", "rest", hidden)]
    return [t for t in layer_terms(arch, parallel, kind, kernels, sequence) if t.module not in RECOMPUTED[recompute]]


def final_norm_terms(arch: Architecture, parallel: ParallelConfig, kernels: PlannedKernels = ON_CUDA) -> list[ActivationTerm]:
    """Return the terms of the final norm, on the last stage."""
    hidden = arch.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    return _norm("the last norm", hidden, hidden / arch.hidden_size, kernels)


def output_bytes(
    arch: Architecture, parallel: ParallelConfig, rows: int, element_size: int, logits_budget: int | None
) -> tuple[float, float]:
    """Return the memory of the output layer on the last stage, as (bytes kept, temporary bytes).

    Kept are also the rows' hidden states and statistics of each row.

    Args:
        logits_budget: Bytes (`training.logits_budget_mib`). None: all logits exist at once, and their gradient reuses their
            memory.
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
    """Return the maximum number of microbatches of a whole stage whose activations a rank keeps at once.

    One-forward-one-backward schedule: the number of stages from this one to the last. Interleaved schedule (arXiv 2104.04473):
    the chunks that run before the first backward, in units of a stage.
    """
    if parallel.vpp == 1:
        return float(parallel.pp - pp_rank)
    chunks = (parallel.vpp - 1) * parallel.pp + 2 * (parallel.pp - pp_rank - 1) + 1
    return chunks / parallel.vpp
