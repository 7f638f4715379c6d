"""Which part of which global tensor of a Megatron checkpoint each Hugging Face tensor becomes.

The answer is Megatron-Core's own: a GPTModel of one rank is built on the meta device (no memory) and asked for its
`sharded_state_dict`. Nothing here knows a key, a shape, or how layers and gate and up projections are laid out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tepo_megatron.actor import build
from tepo_megatron.config import ModelConfig, ParallelConfig
from tepo_megatron.errors import ConversionError
from tepo_megatron.parallel import Groups
from tepo_megatron.weights.families import Family, find_family
from tepo_megatron.weights.gather import Binding, bind
from tepo_megatron.weights.ops import Architecture

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Slot:
    """One Megatron parameter, undivided: its HF tensors and its place in the checkpoint.

    sharded: as the model gave it, on the meta device; a factory cuts the parameter into several pieces.
    """

    binding: Binding
    sharded: ShardedTensor | ShardedTensorFactory
    arch: Architecture

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The HF tensors, in the order of the row."""
        return self.binding.hf_names

    @property
    def shape(self) -> torch.Size:
        """Of the parameter."""
        return self.binding.parameter.shape

    def pieces(self, parameter: Tensor) -> list[ShardedTensor]:
        """The parts of global tensors that the checkpoint holds of `parameter`: views of it wherever Megatron gives views."""
        if isinstance(self.sharded, ShardedTensorFactory):
            built = dataclasses.replace(self.sharded, data=parameter).build()
            return [piece for piece in nested_values({"": built}) if isinstance(piece, ShardedTensor)]
        return [dataclasses.replace(self.sharded, data=parameter, dtype=parameter.dtype)]

    def merged(self, parameter: Tensor, pieces: Sequence[ShardedTensor]) -> Tensor:
        """The parameter, once the data of its `pieces` were filled."""
        own = parameter.untyped_storage().data_ptr()
        if all(p.data.untyped_storage().data_ptr() == own for p in pieces):
            return parameter
        assert isinstance(self.sharded, ShardedTensorFactory)
        merged: Tensor = self.sharded.merge_fn([p.data for p in pieces])
        return merged

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        """The parameter from its HF tensors. Raises ConversionError naming them when they do not fit, or differ in dtype."""
        names = ", ".join(self.hf_names)
        if len({t.dtype for t in tensors}) > 1 or tensors[0].dtype not in _DTYPES:
            dtypes = ", ".join(str(t.dtype).removeprefix("torch.") for t in tensors)
            raise ConversionError(
                f"{names} become {self.binding.name} and must share one dtype of bfloat16, float16, float32, not {dtypes}"
            )
        try:
            with NoIdleCopies():
                parameter = self.binding.row.op.shard(tensors, self.arch, 1, 0)
        except (RuntimeError, ValueError) as e:  # a view or a concatenation that does not fit
            raise ConversionError(f"{names} do not have the shapes of config.json: {e}") from None
        if parameter.shape != self.shape:
            raise ConversionError(
                f"{names} give {self.binding.name} the shape {tuple(parameter.shape)}, "
                f"but config.json asks for {tuple(self.shape)}"
            )
        return parameter

    def to_hf(self, parameter: Tensor) -> list[Tensor]:
        """Its HF tensors, in the order of `hf_names`; some may be views of `parameter`."""
        with NoIdleCopies():
            return self.binding.row.op.unshard([parameter], self.arch)


@dataclass(frozen=True)
class Plan:
    """A whole model. objects: what its modules keep beside parameters (Transformer Engine's extra state, empty here)."""

    family: Family
    arch: Architecture
    slots: tuple[Slot, ...]
    objects: tuple[ShardedObject, ...]

    @property
    def keys(self) -> set[str]:
        """The global tensors of the checkpoint."""
        return {piece.key for slot in self.slots for piece in slot.pieces(_meta(slot))}

    def hf_tensors(self) -> dict[str, Tensor]:
        """All HF tensors, on the meta device: their names and shapes, in the order of the slots."""
        return {name: t for slot in self.slots for name, t in zip(slot.hf_names, slot.to_hf(_meta(slot)), strict=True)}


def make_plan(hf_config: Mapping[str, Any], groups: Groups, content: Mapping[str, Any] | None = None) -> Plan:
    """The plan of a model, from its config.json. groups: a mesh of one rank.

    content: how the checkpoint says that its state dict was made (Megatron's `content_metadata`); None: in the default way.
    Raises ConversionError for an architecture or a field that is not supported.
    """
    family = find_family(hf_config)
    arch = family.architecture(hf_config)
    model, meta = ModelConfig(path=""), torch.device("meta")
    with meta:
        config = build.transformer_config(arch, model, ParallelConfig(), groups.device)
        (chunk,) = build.build_chunks(config, arch, model, dataclasses.replace(groups, device=meta))
    entries = list(nested_values(chunk.sharded_state_dict(metadata=dict(content) if content else None)))
    of_parameter = {id(e.data): e for e in entries if isinstance(e, ShardedTensor | ShardedTensorFactory)}
    slots = []
    for binding in bind([chunk], family, arch):
        if id(binding.parameter) not in of_parameter:
            raise ConversionError(f"parameter {binding.name} is not in the model's sharded state dict")
        slots.append(Slot(binding, of_parameter[id(binding.parameter)], arch))
    return Plan(family, arch, tuple(slots), tuple(e for e in entries if isinstance(e, ShardedObject)))


class NoIdleCopies(TorchFunctionMode):
    """Concatenating one tensor, or padding by nothing, gives the tensor itself instead of a copy.

    An undivided parameter is one shard: without this the largest tensor, the embedding, would be in memory twice.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat and len(args[0]) == 1:
            return args[0][0]
        if func is torch.nn.functional.pad and not any(args[1]):
            return args[0]
        return func(*args, **(kwargs or {}))


def _meta(slot: Slot) -> Tensor:
    return slot.binding.parameter.detach()
