"""Describe the state of an actor as shard slices, which are rectangular parts of global tensors.

Every tensor has the name, the shape and the offset in the whole model that Megatron-Core gives it (`sharded_state_dict`). The
optimizer's tensors have the names of Megatron's `fully_reshardable` format. To write that format, Megatron gathers the
optimizer's shards over dp x cp (`DistributedOptimizer.sharded_param_state_fully_reshardable`, 0.16 to 0.19): every rank then
holds and moves dp x cp times its share, while training waits. Here each rank writes the range that it owns as shard slices of
the global tensors, and nothing is moved between ranks.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor

from tepo_megatron.actor.actor import Actor
from tepo_megatron.checkpoint import optimizer
from tepo_megatron.checkpoint.optimizer import shards

Sizes = tuple[int, ...]


def split_range(start: int, stop: int, shape: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    """Split the elements [start, stop) of a row-major array into the fewest slices.

    Yields:
        (offset, sizes) of each slice, in row-major order; at most 2 * len(shape) - 1 slices.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows that are wholly inside: [first, last)
    if first > last:  # the range lies inside one row
        yield from _within(last, start - last * row, stop - last * row, shape)
        return
    if start < first * row:
        yield from _within(first - 1, start - (first - 1) * row, row, shape)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within(last, 0, stop - last * row, shape)


def ranges(start: int, stop: int, shape: Sizes, limit: int) -> Iterator[tuple[int, int]]:
    """Split [start, stop) at row boundaries into ranges of about `limit` elements."""
    row = max(1, math.prod(shape[1:]))
    stride = max(1, limit // row) * row
    while start < stop:
        end = min(stop, (start // stride + 1) * stride)
        yield start, end
        start = end


def _within(row: int, start: int, stop: int, shape: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    for offset, sizes in split_range(start, stop, shape[1:]):
        yield (row, *offset), (1, *sizes)


# The options of `sharded_state_dict`. They are stored as `content_metadata`, so that Megatron can read a checkpoint by itself.
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "non_homogeneous_layers": True,  # one tensor per layer, because layers may differ
    "singleton_local_shards": False,
}
# Most elements of a shard slice that is written; a single row may have more. A larger shard slice would hold up other threads
# while torch serializes it, and would be read as a whole for any part of it.
_SLICE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class ShardSlice:
    """A rectangular part of a global tensor."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor  # the part, as a view of the state with as many dimensions as the global tensor
    # whether the global tensor may have another shape on another layout (the vocabulary is padded to a multiple that depends on
    # tp). What a smaller stored tensor lacks is 0.
    flexible: bool


def saved_slices(actor: Actor) -> Iterator[ShardSlice]:
    """Yield the shard slices that this rank writes; over all ranks, they hold every element of the state once.

    They are its range of each parameter and of the optimizer's state, and the tensors that are not trained if this rank has
    their first replica. Raises RuntimeError when the actor is offloaded.
    """
    actor.require_loaded("a checkpoint", "parameters", "optimizer")
    shardings = _shardings(actor)
    for shard in shards(actor.optimizer):
        sharding = shardings[id(shard.parameter)]
        if all(r == 0 for r in sharding.replica_id[:2]):  # the third counts replicas over dp x cp, each of which owns a range
            for prefix, values in {"": shard.weight, **shard.state}.items():
                yield from _shard_slices(sharding, prefix, values, shard.start, _SLICE_ELEMENTS)
    for sharding in shardings.values():
        if not sharding.data.requires_grad and is_main_replica(sharding.replica_id):
            yield from _shard_slices(sharding, "", _flat(sharding.data), 0, _SLICE_ELEMENTS)


def objects(actor: Actor) -> dict[str, Any]:
    """Return what Megatron expects in addition to tensors, by name: the "extra state" of modules, which holds scales of fp8.

    With fp32 and bf16 the extra state is empty, and `loaded_slices` reads none of it. Megatron's own loader refuses a
    checkpoint without it.
    """
    values = (v for v in _values(actor) if isinstance(v, ShardedObject) and is_main_replica(v.replica_id))
    return {value.unique_key: value.data for value in values}


def loaded_slices(actor: Actor) -> Iterator[ShardSlice]:
    """Yield the shard slices that this rank reads: all its weights, and its range of the optimizer's state.

    The data of a shard slice are views of the actor's tensors, to be filled in place. Moments that do not exist yet are
    created. Raises RuntimeError when the actor is offloaded.
    """
    actor.require_loaded("to resume", "parameters", "optimizer")
    shardings = _shardings(actor)
    for sharding in shardings.values():
        yield from _shard_slices(sharding, "", _flat(sharding.data), 0, sharding.data.numel())
    for shard in shards(actor.optimizer, create=True):
        for prefix, values in shard.state.items():
            yield from _shard_slices(shardings[id(shard.parameter)], prefix, values, shard.start, values.numel())


def _shardings(actor: Actor) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Return the sharded description of every parameter and persistent buffer of this rank, by the id of the tensor."""
    return {id(v.data): v for v in _values(actor) if isinstance(v, (ShardedTensor, ShardedTensorFactory))}


def _values(actor: Actor) -> Iterator[Any]:
    for chunk in actor.chunks:
        yield from nested_values(chunk.module.sharded_state_dict(metadata=dict(CONTENT)))


def _shard_slices(
    sharding: ShardedTensor | ShardedTensorFactory, prefix: str, values: Tensor, start: int, limit: int
) -> Iterator[ShardSlice]:
    """Yield the shard slices, in the global tensor, of a range of a flattened local tensor."""
    for part, first in _parts(sharding):
        low, high = max(start, first), min(start + values.numel(), first + part.data.numel())
        for a, b in ranges(low - first, high - first, part.local_shape, limit):
            taken = first + a - start
            for offset, sizes in split_range(a, b, part.local_shape):
                count = torch.Size(sizes).numel()
                yield ShardSlice(
                    name=prefix + part.key,
                    shape=tuple(part.global_shape),
                    offset=_in_whole(part, offset),
                    data=values[taken : taken + count].view((1,) * part.prepend_axis_num + sizes),
                    flexible=part.allow_shape_mismatch,
                )
                taken += count


def _parts(sharding: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the parts of a local tensor that are contiguous in the global tensor.

    Each comes with the index of its first element in the flattened local tensor. A factory splits a tensor whose parts lie
    apart in the global one: gate and up projections are one weight here. It must do nothing else: if a part is no contiguous
    view, ranges of the local tensor are no shard slices of the global one, and this raises NotImplementedError.
    """
    if isinstance(sharding, ShardedTensor):
        yield sharding, 0
        return
    built = sharding.build()
    for part in nested_values(built) if isinstance(built, (dict, list)) else [built]:
        same = part.data.untyped_storage().data_ptr() == sharding.data.untyped_storage().data_ptr()
        if not (same and part.data.is_contiguous()):
            raise NotImplementedError(f"{part.key}: Megatron stores this tensor rearranged; checkpoints do not support that")
        yield part, part.data.storage_offset() - sharding.data.storage_offset()


def _in_whole(part: ShardedTensor, offset: tuple[int, ...]) -> tuple[int, ...]:
    prepended = part.prepend_axis_num
    begin = tuple(part.global_offset)
    return begin[:prepended] + tuple(x + y for x, y in zip(begin[prepended:], offset, strict=True))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


_Places = tuple[tuple[int, int, torch.dtype], ...]


class ShardCache:
    """The shard slices and objects of an actor's state, kept from one save to the next.

    To describe the state takes several times as long as to copy that of a small model. The description is valid as long as the
    tensors keep their addresses, so these are compared at every save: a slice of a tensor that was replaced would save old
    values without any error. `shard_slices` keep the memory that they view alive, even if it is no longer part of the state.
    """

    def __init__(self) -> None:
        self.shard_slices: Sequence[ShardSlice] = ()
        # addresses when the shard slices were made; None: the shard slices cannot be reused
        self._places: _Places | None = None
        self._objects: dict[str, Any] | None = None

    def of(self, actor: Actor) -> tuple[Sequence[ShardSlice], dict[str, Any]]:
        """Return what `saved_slices` and `objects` return for the actor.

        The shard slices are the same object as before if no tensor was replaced. The objects are deep copies, which later
        training does not change. Modules are asked for them again if any of them had or has something to give.
        """
        modules = _modules(actor)
        live = _live(actor, modules)
        places = tuple((tensor.data_ptr(), tensor.numel(), tensor.dtype) for tensor in live)
        if places != self._places:
            self.shard_slices, self._objects = (), None  # so that memory of replaced tensors is freed
            self.shard_slices = tuple(saved_slices(actor))
            known = {_storage(tensor) for tensor in live}
            # A shard slice may view other memory: zeros in the place of moments, before the first step, or a copy that a module
            # made.
            self._places = places if all(_storage(shard_slice.data) in known for shard_slice in self.shard_slices) else None
        if self._objects is None or any(map(_filled, (*self._objects.values(), *_extra_states(modules)))):
            self._objects = copy.deepcopy(objects(actor))
        return self.shard_slices, self._objects


def _modules(actor: Actor) -> list[torch.nn.Module]:
    """Return all modules. `Module.modules` takes twice as long; here a module that is used in two places comes twice."""
    modules: list[torch.nn.Module] = [chunk.module for chunk in actor.chunks]
    for module in modules:  # the list grows during the loop
        modules.extend(below for below in module._modules.values() if below is not None)
    return modules


def _live(actor: Actor, modules: Sequence[torch.nn.Module]) -> list[Tensor]:
    """Return every tensor that a shard slice can view, as the actor holds it now."""
    tensors: list[Tensor | None] = list(optimizer.tensors(actor.optimizer))
    for module in modules:
        tensors.extend(module._parameters.values())
        if module._buffers:
            transient = module._non_persistent_buffers_set
            tensors.extend(buffer for name, buffer in module._buffers.items() if name not in transient)
    return [tensor for tensor in tensors if tensor is not None]


def _extra_states(modules: Sequence[torch.nn.Module]) -> list[Any]:
    silent = torch.nn.Module.get_extra_state
    return [module.get_extra_state() for module in modules if type(module).get_extra_state is not silent]


def _filled(extra: Any) -> bool:
    return extra is not None and not (isinstance(extra, Tensor) and extra.numel() == 0)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
