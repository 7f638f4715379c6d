"""What the state of an actor is: boxes of whole tensors.

Every tensor has the name, shape and place in the whole model that Megatron-Core gives it (`sharded_state_dict`), and the
optimizer's the names of its `fully_reshardable` format. To write that format Megatron gathers the optimizer's shards over
dp x cp (`DistributedOptimizer.sharded_param_state_fully_reshardable`, 0.16 to 0.19): every rank then holds and moves dp x cp
times its share, while training waits. Here each rank writes the range that it owns as boxes of the whole tensors, and nothing
moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch import Tensor

from tepo_megatron.actor.actor import Actor
from tepo_megatron.checkpoint.boxes import boxes, ranges
from tepo_megatron.checkpoint.optimizer import shards

# How Megatron is asked to name things; stored, so that it can read a checkpoint by itself (its `content_metadata`).
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "non_homogeneous_layers": True,  # a tensor of its own per layer: layers may differ
    "singleton_local_shards": False,
}
# Elements of a box that is written, or one row: a larger one would hold up other threads while torch packs it, and would be
# read for a part of it.
_BOX_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Box:
    """Part of a whole tensor: its name and shape, where the part begins, and the part itself.

    data: a view of the state, of as many dimensions as the whole. flexible: the whole may have another shape on another layout
    (the vocabulary is padded to a multiple that depends on tp); what it then lacks is 0.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor
    flexible: bool


def written(actor: Actor) -> Iterator[Box]:
    """What this rank writes: over all ranks, every element of the state once.

    Its range of each parameter and of what the optimizer keeps for it, and what is not trained if this is its first replica.
    Raises RuntimeError for an actor that is offloaded.
    """
    actor.require_loaded("a checkpoint", "parameters", "optimizer")
    shardings = _shardings(actor)
    for shard in shards(actor.optimizer):
        sharding = shardings[id(shard.parameter)]
        if all(r == 0 for r in sharding.replica_id[:2]):  # the third counts replicas over dp x cp, each of which owns a range
            for prefix, values in {"": shard.weight, **shard.state}.items():
                yield from _boxes(sharding, prefix, values, shard.start, _BOX_ELEMENTS)
    for sharding in shardings.values():
        if not sharding.data.requires_grad and is_main_replica(sharding.replica_id):
            yield from _boxes(sharding, "", _flat(sharding.data), 0, _BOX_ELEMENTS)


def objects(actor: Actor) -> dict[str, Any]:
    """What Megatron expects besides tensors, by name: "extra state" of modules, which holds scales of fp8.

    With fp32 and bf16 it is empty, and `wanted` asks for none of it; Megatron's own loader refuses a checkpoint without.
    """
    found = (v for v in _values(actor) if isinstance(v, ShardedObject) and is_main_replica(v.replica_id))
    return {value.unique_key: value.data for value in found}


def wanted(actor: Actor) -> Iterator[Box]:
    """What this rank reads: all its weights, and its range of the optimizer's state. The data are the places to read into."""
    actor.require_loaded("to resume", "parameters", "optimizer")
    shardings = _shardings(actor)
    for sharding in shardings.values():
        yield from _boxes(sharding, "", _flat(sharding.data), 0, sharding.data.numel())
    for shard in shards(actor.optimizer, create=True):
        for prefix, values in shard.state.items():
            yield from _boxes(shardings[id(shard.parameter)], prefix, values, shard.start, values.numel())


def _shardings(actor: Actor) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Of every parameter and persistent buffer of this rank, by its id."""
    return {id(v.data): v for v in _values(actor) if isinstance(v, (ShardedTensor, ShardedTensorFactory))}


def _values(actor: Actor) -> Iterator[ShardedBase]:
    for chunk in actor.chunks:
        yield from nested_values(chunk.module.sharded_state_dict(metadata=dict(CONTENT)))


def _boxes(
    sharding: ShardedTensor | ShardedTensorFactory, prefix: str, values: Tensor, start: int, limit: int
) -> Iterator[Box]:
    """The range of a local tensor, flattened, that begins at element `start` and holds `values`, as boxes of the whole.

    limit: elements of a box, unless one row has more.
    """
    for part, first in _parts(sharding):
        low, high = max(start, first), min(start + values.numel(), first + part.data.numel())
        for a, b in ranges(low - first, high - first, part.local_shape, limit):
            taken = first + a - start
            for offset, sizes in boxes(a, b, part.local_shape):
                count = torch.Size(sizes).numel()
                yield Box(
                    name=prefix + part.key,
                    shape=tuple(part.global_shape),
                    offset=_in_whole(part, offset),
                    data=values[taken : taken + count].view((1,) * part.prepend_axis_num + sizes),
                    flexible=part.allow_shape_mismatch,
                )
                taken += count


def _parts(sharding: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """The parts of a local tensor that lie together in the whole, each with its first element in the flattened local tensor.

    A factory cuts a tensor whose parts lie apart in the whole: gate and up projection are one weight here. It may only cut:
    where its parts are no contiguous views, ranges of the local tensor are no boxes of the whole (NotImplementedError).
    """
    if isinstance(sharding, ShardedTensor):
        yield sharding, 0
        return
    built = sharding.build()
    for part in nested_values(built) if isinstance(built, (dict, list)) else [built]:
        same = part.data.untyped_storage().data_ptr() == sharding.data.untyped_storage().data_ptr()
        if not (same and part.data.is_contiguous()):
            raise NotImplementedError(f"{part.key}: Megatron stores it rearranged, which checkpoints do not know to undo")
        yield part, part.data.storage_offset() - sharding.data.storage_offset()


def _in_whole(part: ShardedTensor, offset: tuple[int, ...]) -> tuple[int, ...]:
    prepended = part.prepend_axis_num
    begin = tuple(part.global_offset)
    return begin[:prepended] + tuple(x + y for x, y in zip(begin[prepended:], offset, strict=True))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)
