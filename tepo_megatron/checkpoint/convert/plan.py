"""Map each Hugging Face tensor to its part of a global tensor in a Megatron checkpoint, in a mesh of a single rank on the CPU.

The mapping is Megatron-Core's own: a GPTModel of one rank is built on the meta device (without memory) and asked for its
`sharded_state_dict`. No key, no shape, and no layout of layers or of gate and up projections is written down here.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tepo_megatron.actor import build
from tepo_megatron.base.errors import ConversionError
from tepo_megatron.config import ModelConfig, ParallelConfig
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.dist.platform import activate
from tepo_megatron.models.families import Family, find_family
from tepo_megatron.models.gather import Binding, bind
from tepo_megatron.models.ops import Architecture


@contextlib.contextmanager
def world_of_one() -> "Iterator[ParallelDims]":
    """Yield a mesh of this process alone, which lasts as long as the block. It needs no network and no free port."""
    platform = activate("cpu")
    from tepo_megatron.dist import parallel  # imports Megatron-Core, which the platform must precede

    dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=parallel.HOST_LIMIT)
    try:
        yield parallel.initialize(ParallelConfig(), platform, seed=0)
    finally:
        parallel.shutdown()


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class ParameterSlot:
    """One whole Megatron parameter: its HF tensors and its place in the checkpoint."""

    binding: Binding  # the parameter, on the meta device, and its HF tensors
    # the model's description of where the checkpoint stores the parameter; a factory splits it into several pieces
    sharded: ShardedTensor | ShardedTensorFactory
    arch: Architecture

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Return the names of the HF tensors, in the order of the table row."""
        return self.binding.hf_names

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the parameter."""
        return self.binding.parameter.shape

    def pieces(self, parameter: Tensor) -> list[ShardedTensor]:
        """Return the parts of `parameter` that the checkpoint stores. They are views of it wherever Megatron gives views."""
        if isinstance(self.sharded, ShardedTensorFactory):
            built = dataclasses.replace(self.sharded, data=parameter).build()
            return [piece for piece in nested_values({"": built}) if isinstance(piece, ShardedTensor)]
        return [dataclasses.replace(self.sharded, data=parameter, dtype=parameter.dtype)]

    def merged(self, parameter: Tensor, pieces: Sequence[ShardedTensor]) -> Tensor:
        """Return the parameter, once the data of its pieces have been filled."""
        own = parameter.untyped_storage().data_ptr()
        if all(p.data.untyped_storage().data_ptr() == own for p in pieces):
            return parameter
        assert isinstance(self.sharded, ShardedTensorFactory)
        return self.sharded.merge_fn([p.data for p in pieces])

    def from_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the Megatron parameter made of its whole HF tensors, which are in the order of `hf_names`.

        Raises ConversionError, naming the tensors, when their shapes do not fit or their dtypes differ or are not supported.
        """
        names = ", ".join(self.hf_names)
        if len({t.dtype for t in tensors}) > 1 or tensors[0].dtype not in _DTYPES:
            dtypes = ", ".join(str(t.dtype).removeprefix("torch.") for t in tensors)
            raise ConversionError(
                f"{names} become {self.binding.name} and must share one dtype of bfloat16, float16, float32, not {dtypes}"
            )
        try:
            with NoRedundantCopies():
                parameter = self.binding.row.op.shard(tensors, self.arch, 1, 0)
        except (RuntimeError, ValueError) as e:  # shapes of a view or a concatenation do not fit
            raise ConversionError(f"{names} do not have the shapes of config.json: {e}") from None
        if parameter.shape != self.shape:
            raise ConversionError(
                f"{names} give {self.binding.name} the shape {tuple(parameter.shape)}, "
                f"but config.json asks for {tuple(self.shape)}"
            )
        return parameter

    def to_hf(self, parameter: Tensor) -> list[Tensor]:
        """Return the whole HF tensors of a parameter, in the order of `hf_names`; some may be views of it."""
        with NoRedundantCopies():
            return self.binding.row.op.unshard([parameter], self.arch)


@dataclass(frozen=True)
class ConversionPlan:
    """The conversion plan of a whole model."""

    family: Family
    arch: Architecture
    slots: tuple[ParameterSlot, ...]
    # what modules keep in addition to parameters (Transformer Engine's extra state, empty here)
    objects: tuple[ShardedObject, ...]

    @property
    def keys(self) -> set[str]:
        """Return the keys of all global tensors of the checkpoint."""
        return {piece.key for slot in self.slots for piece in slot.pieces(_meta(slot))}

    def hf_tensors(self) -> dict[str, Tensor]:
        """Return all HF tensors on the meta device, by name, in the order of the slots."""
        return {name: t for slot in self.slots for name, t in zip(slot.hf_names, slot.to_hf(_meta(slot)), strict=True)}


def make_plan(hf_config: Mapping[str, Any], groups: ParallelDims, content: Mapping[str, Any] | None = None) -> ConversionPlan:
    """Return the conversion plan of a model.

    Args:
        content: the options of `sharded_state_dict` that the checkpoint was written with (Megatron's `content_metadata`); None:
            the defaults.
    Raises:
        ConversionError: the architecture or a field of config.json is not supported.
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
        slots.append(ParameterSlot(binding, of_parameter[id(binding.parameter)], arch))
    return ConversionPlan(family, arch, tuple(slots), tuple(e for e in entries if isinstance(e, ShardedObject)))


class NoRedundantCopies(TorchFunctionMode):
    """Makes torch.cat of one tensor, and padding by nothing, return the tensor itself instead of a copy.

    A whole parameter is one shard. Without this mode the largest tensor, the embedding, would be in memory twice.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat and len(args[0]) == 1:
            return args[0][0]
        if func is torch.nn.functional.pad and not any(args[1]):
            return args[0]
        return func(*args, **(kwargs or {}))


def _meta(slot: ParameterSlot) -> Tensor:
    return slot.binding.parameter.detach()
