"""Count the bytes that a delivery of all weights moves, and the fewest that could do: what each server rank holds.

Counts are exact but for the padding of the vocabulary, in the engine and in Megatron. Deltas (`sync.delta`) are not counted.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tepo_megatron.config import ParallelConfig, SyncConfig
from tepo_megatron.plan import parameters
from tepo_megatron.plan.gpus import GIB
from tepo_megatron.weights.families import WeightMapping
from tepo_megatron.weights.ops import Architecture, FusedGatedQKV, FusedQKV, Replicated


@dataclass(frozen=True)
class WeightTraffic:
    """Bytes of one delivery of all weights.

    Attributes:
        whole: All weights. Every sender sends its tensors once, whatever the number of servers. One server rank receives them
            (`group`), or finds them in memory that it maps (`shm`, `ipc`).
        gathered: What trainer ranks send to each other before, over tp.
        held: What one server rank keeps of it: the fewest bytes that could arrive.
    """

    whole: float
    gathered: float
    held: float


def weight_traffic(rows: tuple[WeightMapping, ...], arch: Architecture, tp: int, server_tp: int, element: int) -> WeightTraffic:
    """Return the bytes of a delivery, which are the same for all transports."""
    whole = gathered = held = 0.0
    for row, elements in _tensors(rows, arch):
        size = elements * element
        whole += size
        gathered += size * (0.0 if isinstance(row.op, Replicated) else (tp - 1) / tp)
        held += size * _held_share(row, arch, server_tp)
    return WeightTraffic(whole, gathered, held)


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
        (f"{how} ({kind})", traffic.whole, traffic.held),
    ):
        yield f"  {name}".ljust(52) + f"{size / GIB:10.2f}, at best {best / GIB:.2f}"
