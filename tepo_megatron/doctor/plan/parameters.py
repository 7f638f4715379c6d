"""Count every parameter of every rank, and the buffers in which Megatron-Core keeps them, to the byte.

The kinds of a model's layers, and what one with the gated delta rule computes and caches, are here, too. The counts come from
the rows of the model's family (`models/families`) and the layout of Megatron-Core 0.16. Its DDP puts a chunk's parameters into
one buffer each for weights and gradients, in reverse order, each at a multiple of 64 elements. Its distributed optimizer gives
each data-parallel rank an equal slice of every bucket.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tepo_megatron.actor.layout import stage_layers
from tepo_megatron.config import ParallelConfig
from tepo_megatron.models.families import WeightMapping
from tepo_megatron.models.ops import Architecture, LinearAttention, Replicated, padded_vocab_size

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


_ALIGNMENT = 64  # elements; every parameter starts at a multiple
_BUCKET_MULTIPLE = 128  # elements; every bucket ends at a common multiple of this and the number of ranks
_EXPERT = ".experts.{expert}."
# order in which Megatron's modules register the parameters of a layer
_ORDER = (
    "input_layernorm.weight", "conv_weight", "A_log", "dt_bias", "norm_weight", "in_proj.weight", "out_proj.weight",
    "linear_proj.weight", "linear_qkv.weight", "linear_qkv.bias", "q_layernorm.weight", "k_layernorm.weight",
    "pre_mlp_layernorm.weight", "mlp.router.weight", "linear_fc1.weight", "linear_fc2.weight",
)  # fmt: skip
_LINEAR = (
    "linear_proj.weight", "linear_qkv.weight", "linear_fc1.weight", "linear_fc2.weight", "in_proj.weight", "out_proj.weight",
)  # fmt: skip


@dataclass(frozen=True)
class ModelChunk:
    """One model chunk."""

    layers: tuple[int, ...]  # numbered in the whole model
    first: bool  # true if it has the embedding
    last: bool  # true if it has the output layer


@dataclass(frozen=True)
class Parameter:
    """One parameter on one tensor-parallel rank."""

    name: str
    elements: int
    expert: bool = False  # true for a parameter of an expert, if experts are spread over ranks
    alone: bool = False  # true if it has a bucket of its own


@dataclass(frozen=True)
class HeldElements:
    """Elements that one rank holds."""

    parameters: int = 0
    buffers: tuple[int, ...] = ()  # with padding, of each weight buffer, which is also the size of its gradient buffer
    shards: tuple[int, ...] = ()  # of each part of a parameter whose optimizer state the rank keeps

    @property
    def buffer(self) -> int:
        """Return the elements of all weight buffers."""
        return sum(self.buffers)

    @cached_property
    def owned(self) -> int:
        """Return the elements whose optimizer state the rank keeps."""
        return sum(self.shards)

    def __add__(self, other: "HeldElements") -> "HeldElements":
        return HeldElements(self.parameters + other.parameters, self.buffers + other.buffers, self.shards + other.shards)


@lru_cache(maxsize=8192)
def stages(arch: Architecture, parallel: ParallelConfig, rank: int) -> list[ModelChunk]:
    """Return the model chunks of a pipeline rank."""
    if parallel.vpp == 1:
        sizes = stage_layers(arch.num_layers, parallel.pp)
        start = sum(sizes[:rank])
        return [ModelChunk(tuple(range(start, start + sizes[rank])), rank == 0, rank == parallel.pp - 1)]
    pieces = parallel.pp * parallel.vpp
    size = arch.num_layers // pieces
    places = [chunk * parallel.pp + rank for chunk in range(parallel.vpp)]
    return [ModelChunk(tuple(range(at * size, (at + 1) * size)), at == 0, at == pieces - 1) for at in places]


def shape(row: WeightMapping, arch: Architecture, tp: int) -> tuple[int, ...]:
    """Return the shape of a row's Megatron parameter on one tensor-parallel rank."""
    qkv = ((1 + arch.attention_output_gate) * arch.num_heads + 2 * arch.num_query_groups) * arch.head_dim
    ffn = arch.experts.ffn_size if arch.experts is not None and _EXPERT in row.megatron else arch.ffn_size
    vocabulary = (padded_vocab_size(arch.vocab_size, tp), arch.hidden_size)
    whole: dict[str, tuple[int, ...]] = {
        "word_embeddings.weight": vocabulary,
        "output_layer.weight": vocabulary,
        "layernorm.weight": (arch.hidden_size,),
        "q_layernorm.weight": (arch.head_dim,),
        "k_layernorm.weight": (arch.head_dim,),
        "linear_qkv.weight": (qkv, arch.hidden_size),
        "linear_qkv.bias": (qkv,),
        "linear_proj.weight": (arch.hidden_size, arch.num_heads * arch.head_dim),
        "router.weight": (0 if arch.experts is None else arch.experts.number, arch.hidden_size),
        "linear_fc1.weight": (2 * ffn, arch.hidden_size),
        "linear_fc2.weight": (arch.hidden_size, ffn),
    }
    if (linear := arch.linear_attention) is not None:
        values = linear.value_heads * linear.value_dim
        whole |= {
            "in_proj.weight": (sum(linear.projected), arch.hidden_size),
            "out_proj.weight": (arch.hidden_size, values),
            "conv_weight": (sum(linear.convolved), linear.conv_width),
            "norm_weight": (linear.value_dim,),
            "A_log": (linear.value_heads,),
            "dt_bias": (linear.value_heads,),
        }
    suffix = max((s for s in whole if row.megatron.endswith(s)), key=len)
    size = list(whole[suffix])
    size[getattr(row.op, "dim", 0)] //= 1 if isinstance(row.op, Replicated) else tp
    return tuple(size)


def chunk_parameters(
    rows_of: tuple[WeightMapping, ...], arch: Architecture, parallel: ParallelConfig, stage: ModelChunk
) -> Iterator[Parameter]:
    """Yield the parameters of a model chunk on one rank, in the order of its modules."""
    rows = {row: math.prod(shape(row, arch, parallel.tp)) for row in rows_of}
    of_layers = sorted((r for r in rows if "{layer}" in r.megatron), key=_place)
    by_name = {r.megatron: n for r, n in rows.items()}
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"
    shared = arch.tied_embeddings and parallel.pp > 1
    if stage.first:
        yield Parameter(embedding, by_name[embedding], alone=shared)
    for layer in stage.layers:
        sparse = layer in arch.sparse_layers
        here = [r for r in of_layers if r.is_in(arch, layer)]
        for row in here:
            if _EXPERT not in row.megatron:
                yield Parameter(row.megatron, rows[row])
        for _ in range(arch.experts.number // parallel.ep if sparse and arch.experts is not None else 0):
            for row in here:
                if _EXPERT in row.megatron:
                    yield Parameter(row.megatron, rows[row], expert=parallel.ep > 1)
    if stage.last:
        yield Parameter("decoder.final_layernorm.weight", arch.hidden_size)
        if not (arch.tied_embeddings and stage.first):
            yield Parameter(output, by_name[output], alone=shared)


def rank_parameters(
    rows: tuple[WeightMapping, ...], arch: Architecture, parallel: ParallelConfig, pp_rank: int
) -> list[Parameter]:
    """Return the parameters of all model chunks of a pipeline rank."""
    return [p for stage in stages(arch, parallel, pp_rank) for p in chunk_parameters(rows, arch, parallel, stage)]


@lru_cache(maxsize=8192)
def held(
    rows: tuple[WeightMapping, ...], arch: Architecture, parallel: ParallelConfig, pp_rank: int, dp_cp_rank: int | None = None
) -> HeldElements:
    """Return the elements that one rank holds.

    Args:
        dp_cp_rank: Rank among those that share gradients (context-parallel neighbours first). None: the one that owns most.
    """
    whole = parallel.dp * parallel.cp
    per_rank = [HeldElements()] * whole
    for stage in stages(arch, parallel, pp_rank):
        chunk = list(chunk_parameters(rows, arch, parallel, stage))
        for expert, ranks in ((False, whole), (True, whole // parallel.ep)):
            sizes = tuple((p.elements, p.alone) for p in chunk if p.expert == expert)
            if not sizes:
                continue
            buffer, shards = _buffer(sizes, ranks)
            total = sum(n for n, _ in sizes)
            # ranks with the same experts are ep ranks apart
            places = [rank // parallel.ep if expert else rank for rank in range(whole)]
            per_rank = [a + HeldElements(total, (buffer,), shards[at]) for a, at in zip(per_rank, places, strict=True)]
    return max(per_rank, key=lambda h: h.owned) if dp_cp_rank is None else per_rank[dp_cp_rank]


@lru_cache(maxsize=8192)
def linear_parameters(
    rows: tuple[WeightMapping, ...], arch: Architecture, parallel: ParallelConfig, pp_rank: int, ends: tuple[int, int] = (0, 0)
) -> int:
    """Return the elements of a rank's weights that Transformer Engine's linear modules multiply with."""
    total = 0
    for stage in stages(arch, parallel, pp_rank):
        layers = tuple(layer for layer in stage.layers if ends[0] <= layer < arch.num_layers - ends[1])
        shards = chunk_parameters(rows, arch, parallel, ModelChunk(layers, False, False))
        total += sum(p.elements for p in shards if p.name.endswith(_LINEAR))
    return total


@lru_cache(maxsize=64)
def total_parameters(rows: tuple[WeightMapping, ...], arch: Architecture) -> int:
    """Return the parameters of the whole model, counting tied ones once and without vocabulary padding."""
    alone = ParallelConfig()
    padding = padded_vocab_size(arch.vocab_size, 1) - arch.vocab_size
    tables = 1 if arch.tied_embeddings else 2
    shards = chunk_parameters(rows, arch, alone, stages(arch, alone, 0)[0])
    return sum(p.elements for p in shards) - tables * padding * arch.hidden_size


def _place(row: WeightMapping) -> int:
    return next(i for i, suffix in enumerate(_ORDER) if row.megatron.endswith(suffix))


@lru_cache(maxsize=4096)
def _buffer(sizes: Sequence[tuple[int, bool]], ranks: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return the elements of a buffer and of the shards that each of `ranks` ranks owns. sizes: (elements, alone) pairs."""
    shards: list[list[int]] = [[] for _ in range(ranks)]
    multiple = math.lcm(ranks, _BUCKET_MULTIPLE)
    end = bucket = 0
    places: list[tuple[int, int]] = []  # (start, end) of the parameters in the bucket being filled

    def close() -> None:
        nonlocal end, bucket, places
        end = -(-end // multiple) * multiple
        share = (end - bucket) // ranks
        for start, stop in places:
            for rank in range((start - bucket) // share, (stop - 1 - bucket) // share + 1):
                low = bucket + rank * share
                shards[rank].append(min(stop, low + share) - max(start, low))
        bucket, places = end, []

    for elements, alone in reversed(sizes):
        if alone and places:
            close()
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + elements
        places.append((start, end))
        if alone:
            close()
    if places:
        close()
    return end, tuple(map(tuple, shards))
