"""Cache the shard slices of an actor's state from one save to the next.

To describe the state takes several times as long as to copy the state of a small model, and the description is valid as long as
the tensors keep their addresses. A shard slice of a tensor that was replaced would save old values without any error, so the
addresses are compared at every save.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.actor.actor import Actor
from tepo_megatron.checkpoint import optimizer
from tepo_megatron.checkpoint.state import ShardSlice, objects, saved_slices

_Places = tuple[tuple[int, int, torch.dtype], ...]


class ShardCache:
    """The cached shard slices and objects of an actor's state.

    `shard_slices`: the shard slices found last. They keep the memory that they view alive, even if it is no longer part of the
    state.
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
    found: list[torch.nn.Module] = [chunk.module for chunk in actor.chunks]
    for module in found:  # the list grows during the loop
        found.extend(below for below in module._modules.values() if below is not None)
    return found


def _live(actor: Actor, modules: Sequence[torch.nn.Module]) -> list[Tensor]:
    """Return every tensor that a shard slice can view, as the actor holds it now."""
    found: list[Tensor | None] = list(optimizer.tensors(actor.optimizer))
    for module in modules:
        found.extend(module._parameters.values())
        if module._buffers:
            transient = module._non_persistent_buffers_set
            found.extend(buffer for name, buffer in module._buffers.items() if name not in transient)
    return [tensor for tensor in found if tensor is not None]


def _extra_states(modules: Sequence[torch.nn.Module]) -> list[Any]:
    silent = torch.nn.Module.get_extra_state
    return [module.get_extra_state() for module in modules if type(module).get_extra_state is not silent]


def _filled(extra: Any) -> bool:
    return extra is not None and not (isinstance(extra, Tensor) and extra.numel() == 0)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
