"""Between a Hugging Face directory and the parameters of this rank, on any layout.

A parameter is found by its Megatron name with the layer's number in the whole model, so tensor, pipeline and virtual-pipeline
layouts need no rule of their own beyond the tensor-parallel cut of `weights/ops.py`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.errors import ConversionError
from tepo_megatron.parallel import Axis, Groups
from tepo_megatron.weights import hf_io
from tepo_megatron.weights.families import Family, Row
from tepo_megatron.weights.ops import Architecture, Replicated

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
# Transformer Engine fuses the norm before a linear layer into it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@dataclass(frozen=True)
class Binding:
    """One parameter of this rank and the HF tensors it is made of."""

    name: str  # as in the whole model
    parameter: torch.nn.Parameter
    row: Row
    hf_names: tuple[str, ...]


def bind(chunks: Sequence[torch.nn.Module], family: Family, arch: Architecture) -> list[Binding]:
    """Every parameter of this rank's model chunks with its table row. Raises ConversionError for an unmapped one."""
    rows = {row.megatron: row for row in family.rows}
    bindings = []
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            name, layer = _global_name(chunk, local_name)
            pattern = _LAYER.sub("decoder.layers.{layer}.", name)
            if pattern not in rows:
                raise ConversionError(f"parameter {name} has no row in the table of family {family.name}")
            row = rows[pattern]
            if name == "output_layer.weight" and arch.tied_embeddings:
                hf_names: tuple[str, ...] = ("model.embed_tokens.weight",)  # the last stage's copy of a tied embedding
            else:
                hf_names = tuple(n.format(layer=layer) for n in row.hf)
            bindings.append(Binding(name, parameter, row, hf_names))
    return bindings


def load_hf(bindings: Sequence[Binding], reader: hf_io.HfReader, family: Family, arch: Architecture, tp: Axis) -> None:
    """Fill this rank's parameters from a HF directory, in place, tensor by tensor.

    Raises ConversionError for a tensor that is missing, left over, or of the wrong shape.
    """
    expected = expected_names(family, arch)
    left_over = sorted(reader.names() - expected - {"lm_head.weight"})
    if left_over:
        raise ConversionError(
            f"{reader.path}: tensor {left_over[0]} (and {len(left_over) - 1} more) is in no row of family {family.name}"
        )
    for b in bindings:
        try:
            shard = b.row.op.shard([reader.get(n) for n in b.hf_names], arch, tp.size, tp.rank)
        except (RuntimeError, ValueError) as e:  # a view or a concatenation that does not fit
            raise ConversionError(
                f"{reader.path}: {', '.join(b.hf_names)} do not have the shapes of config.json: {e}"
            ) from None
        if shard.shape != b.parameter.shape:
            raise ConversionError(
                f"{reader.path}: {', '.join(b.hf_names)} give {b.name} the shape {tuple(shard.shape)}, "
                f"but config.json asks for {tuple(b.parameter.shape)}"
            )
        if not bool(torch.isfinite(shard).all()):
            raise ConversionError(f"{reader.path}: {', '.join(b.hf_names)} hold values that are not finite")
        with torch.no_grad():
            b.parameter.copy_(shard)


def expected_names(family: Family, arch: Architecture) -> set[str]:
    """All HF tensor names of a model of this architecture."""
    names = set()
    for row in family.rows:
        layers = range(arch.num_layers) if "{layer}" in row.megatron else (0,)
        names |= {n.format(layer=i) for i in layers for n in row.hf}
    return names - {"lm_head.weight"} if arch.tied_embeddings else names


def iterate_hf(bindings: Sequence[Binding], arch: Architecture, tp: Axis) -> Iterator[tuple[str, Tensor]]:
    """Whole HF tensors of this pipeline stage, one parameter after the other; on tensor-parallel rank 0 only.

    All ranks of a tensor-parallel group must iterate. Collectives: one gather over tp for each split parameter.
    A tied embedding appears once, from the first stage.
    """
    for b in bindings:
        if b.name == "output_layer.weight" and arch.tied_embeddings:
            continue
        shards = _gather_shards(b, tp)
        if shards:
            yield from zip(b.hf_names, b.row.op.unshard(shards, arch), strict=True)


def export_hf(bindings: Sequence[Binding], arch: Architecture, groups: Groups, base: Path, out: Path) -> None:
    """Write the model as a HF directory: every pipeline stage writes its own shards, rank 0 config, tokenizer and index.

    All ranks call it; `out` must be on a file system that they share. It appears complete or not at all.
    """
    temporary = out.with_name(out.name + ".partial")
    if groups.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    mine: tuple[dict[str, list[str]], int] = ({}, 0)
    if groups.is_first_replica:
        stream = _Counted(iterate_hf(bindings, arch, groups.tp))
        written = hf_io.write_shards(stream, temporary, f"model-stage{groups.pp.rank:02d}", limit=4 * 2**30)
        mine = (written, stream.bytes)
    everything = [mine] * groups.world_size
    dist.all_gather_object(everything, mine)
    if groups.is_main:
        all_files = {file: names for files, _ in everything for file, names in files.items()}
        hf_io.write_index(temporary, all_files, total_bytes=sum(size for _, size in everything))
        hf_io.carry_over(base, temporary, next(iter(bindings)).parameter.dtype)
        hf_io.publish(temporary, out)
    dist.barrier()


class _Counted:
    """A stream of named tensors that remembers how many bytes went by."""

    def __init__(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        self._stream, self.bytes = stream, 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._stream:
            self.bytes += tensor.nbytes
            yield name, tensor


def _gather_shards(binding: Binding, tp: Axis) -> list[Tensor]:
    """The shards of all tensor-parallel ranks, on rank 0; elsewhere an empty list."""
    shard = binding.parameter.detach()
    if tp.size == 1 or isinstance(binding.row.op, Replicated):
        return [shard] if tp.rank == 0 else []
    shards = [torch.empty_like(shard) for _ in range(tp.size)] if tp.rank == 0 else []
    dist.gather(shard.contiguous(), shards or None, group_dst=0, group=tp.group)
    return shards


def _global_name(chunk: torch.nn.Module, name: str) -> tuple[str, int]:
    """The parameter's name with the layer's number in the whole model, and that number (0 outside the layers)."""
    for fused, plain in _FUSED_NORMS.items():
        name = name.replace(fused, plain)
    match = _LAYER.match(name)
    if match is None:
        return name, 0
    layer = chunk.decoder.layers[int(match.group(1))].layer_number - 1
    return _LAYER.sub(f"decoder.layers.{layer}.", name, count=1), layer
