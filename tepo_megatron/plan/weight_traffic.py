"""Count the bytes that a delivery of all weights moves, and the fewest that could do: what each server rank holds.

Counts are exact but for the padding of the vocabulary, in the engine and in Megatron. Deltas (`sync.delta`) are not counted:
how much they save depends on the updates (`benchmarks/results/weight_deltas.md`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tepo_megatron.config import ParallelConfig, SyncConfig
from tepo_megatron.plan import parameters
from tepo_megatron.plan.gpus import GIB
from tepo_megatron.weights.families import WeightMapping
from tepo_megatron.weights.ops import (
    Architecture,
    FusedGatedQKV,
    FusedHeads,
    FusedQKV,
    Replicated,
    Vocabulary,
    padded_vocab_size,
)

_VOCABULARY_MULTIPLE = 64  # engines pad other vocabularies, which are sent whole


@dataclass(frozen=True)
class WeightTraffic:
    """Bytes of one delivery of all weights.

    Attributes:
        whole: All weights. Every sender sends its tensors once, whatever the number of servers.
        gathered: What trainer ranks send to each other before, over tp. With slices nothing, where trainer and servers hold
            the same parts (`weight_sync/own_slices.py`).
        arriving: What one server rank receives (`group`), or finds in memory that it maps (`shm`, `ipc`).
        held: What one server rank keeps of it: the fewest bytes that could arrive.
    """

    whole: float
    gathered: float
    arriving: float
    held: float


def weight_traffic(
    rows: tuple[WeightMapping, ...], arch: Architecture, tp: int, server_tp: int, element: int, slices: bool = False
) -> WeightTraffic:
    """Return the bytes of a delivery, which are the same for all transports that send whole tensors."""
    whole = gathered = arriving = held = 0.0
    for row, elements in _tensors(rows, arch):
        size = elements * element
        whole += size
        gathered += size * _gathered_share(row, arch, tp, server_tp, slices)
        arriving += size * (_sliced_share(row, arch, server_tp) if slices else 1)
        held += size * _held_share(row, arch, server_tp)
    return WeightTraffic(whole, gathered, arriving, held)


def _tensors(rows: tuple[WeightMapping, ...], arch: Architecture) -> Iterator[tuple[WeightMapping, int]]:
    """Yield (row, number of elements) of each parameter of the model; a tied output layer is not sent."""
    alone = ParallelConfig()
    of_name = {row.megatron: row for row in rows}
    vocabulary = arch.vocab_size * arch.hidden_size
    for parameter in parameters.chunk_parameters(rows, arch, alone, parameters.stages(arch, alone, 0)[0]):
        is_table = parameter.name in ("embedding.word_embeddings.weight", "output_layer.weight")
        yield of_name[parameter.name], vocabulary if is_table else parameter.elements


def _held_share(row: WeightMapping, arch: Architecture, server_tp: int) -> float:
    """Return the share of a parameter that each rank of a server holds. With more ranks than KV heads, heads are replicated."""
    if isinstance(row.op, Replicated):
        return 1.0
    if isinstance(row.op, FusedQKV | FusedGatedQKV):
        queries, groups = _query_heads(row, arch), arch.num_query_groups
        held = queries / server_tp + 2 * math.ceil(groups / server_tp)
        return held / (queries + 2 * groups)
    return 1 / server_tp


def _query_heads(row: WeightMapping, arch: Architecture) -> int:
    """Return the query heads, counting an output gate as a second head."""
    return arch.num_heads * (2 if isinstance(row.op, FusedGatedQKV) else 1)


def _gathered_share(row: WeightMapping, arch: Architecture, tp: int, server_tp: int, slices: bool) -> float:
    """Return the share of a parameter that tensor-parallel ranks send to each other before a delivery."""
    if isinstance(row.op, Replicated):
        return 0.0
    if not (slices and tp == server_tp):
        return (tp - 1) / tp
    own = arch.vocab_size % _VOCABULARY_MULTIPLE == 0 and padded_vocab_size(arch.vocab_size, tp) == arch.vocab_size
    if isinstance(row.op, FusedHeads):  # those tensors that are cut are a rank's own; the first one is sent whole
        return (tp - 1.0) * _whole_share(row.op, arch)
    if isinstance(row.op, FusedQKV | FusedGatedQKV):
        own = arch.num_heads % tp == 0 and arch.num_query_groups % tp == 0
    elif not isinstance(row.op, Vocabulary):
        own = True
    return 0.0 if own else tp - 1.0  # all ranks get the whole of it


def _sliced_share(row: WeightMapping, arch: Architecture, server_tp: int) -> float:
    """Return the share of a parameter that each rank of a server is sent with slices (`weight_sync/buckets.py: slice_dims`)."""
    if isinstance(row.op, FusedQKV | FusedGatedQKV) and arch.num_query_groups % server_tp:
        queries, groups = _query_heads(row, arch), arch.num_query_groups
        return (queries / server_tp + 2 * groups) / (queries + 2 * groups)
    if isinstance(row.op, FusedHeads):
        whole = _whole_share(row.op, arch)
        return whole + (1 - whole) / server_tp
    if isinstance(row.op, Vocabulary) and arch.vocab_size % _VOCABULARY_MULTIPLE:
        return 1.0
    return _held_share(row, arch, server_tp)


def _whole_share(op: FusedHeads, arch: Architecture) -> float:
    """Return the share of the first tensor, of queries, keys and values, which is sent whole with slices."""
    kinds = op.kinds(arch)
    return sum(kinds[:3]) / sum(kinds)


def traffic_lines(traffic: WeightTraffic, sync: SyncConfig) -> Iterator[str]:
    """Yield the lines of `tepo plan`.

    Args:
        traffic: The bytes.
    """
    kind = sync.transport.type
    how = "arrive at each server rank" if kind == "group" else "lie in memory that each server rank maps"
    yield "a delivery of all weights, GiB"
    for name, size, best in (
        ("sent, once for all servers", traffic.whole, traffic.whole),
        ("gathered over tp before", traffic.gathered, 0.0),
        (f"{how} ({kind})", traffic.arriving, traffic.held),
    ):
        yield f"  {name}".ljust(52) + f"{size / GIB:10.2f}, at best {best / GIB:.2f}"
    if sync.delta == "elements":
        yield "  kept in host memory by each process of a server".ljust(52) + f"{traffic.arriving / GIB:10.2f}"
