"""The boxes of an actor's state, kept from one save to the next.

To describe the state takes several times as long as to copy that of a small model, and it is the same at every save while the
tensors lie where they lay. A box of a tensor that was replaced would be saved as it once was, and nothing would tell; so what
lies where is asked at every save.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.actor.actor import Actor
from tepo_megatron.checkpoint import optimizer
from tepo_megatron.checkpoint.state import Box, objects, written

_Places = tuple[tuple[int, int, torch.dtype], ...]


class Views:
    """What an actor's state is now.

    boxes: as they were found last. They keep what they view in memory, also where it is no longer the state.
    """

    def __init__(self) -> None:
        self.boxes: Sequence[Box] = ()
        self._places: _Places | None = None  # of the tensors that the boxes view; None: they cannot be used again
        self._objects: dict[str, Any] | None = None

    def of(self, actor: Actor) -> tuple[Sequence[Box], dict[str, Any]]:
        """As `written` and `objects`. The boxes are the same object as before if no tensor was replaced.

        The objects are out of reach of what happens next. Modules are asked for them anew where one had or has any to give.
        """
        modules = _modules(actor)
        live = _live(actor, modules)
        places = tuple((tensor.data_ptr(), tensor.numel(), tensor.dtype) for tensor in live)
        if places != self._places:
            self.boxes, self._objects = (), None  # they do not hold on to what was replaced
            self.boxes = tuple(written(actor))
            known = {_storage(tensor) for tensor in live}
            # zeros stand for moments before the first step, and a module may describe a copy of what it holds
            self._places = places if all(_storage(box.data) in known for box in self.boxes) else None
        if self._objects is None or any(map(_filled, (*self._objects.values(), *_extra_states(modules)))):
            self._objects = copy.deepcopy(objects(actor))
        return self.boxes, self._objects


def _modules(actor: Actor) -> list[torch.nn.Module]:
    """As `modules()`, which takes twice as long; one that is used in two places comes twice."""
    found: list[torch.nn.Module] = [chunk.module for chunk in actor.chunks]
    for module in found:  # which grows meanwhile
        found.extend(below for below in module._modules.values() if below is not None)
    return found


def _live(actor: Actor, modules: Sequence[torch.nn.Module]) -> list[Tensor]:
    """Every tensor that a box can view, as the actor holds it now."""
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
