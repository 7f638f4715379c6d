"""Load and export this rank's parameters from and to a Hugging Face directory, on any parallel layout.

A parameter is identified by its Megatron name with the indices of its layer and expert in the whole model. So tensor, pipeline,
virtual-pipeline and expert parallelism need no rules of their own, except for the tensor-parallel split in `models/ops.py`.
"""

import collections
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.base.errors import CheckpointError, ConversionError, RunReplacedError
from tepo_megatron.base.storage import writing
from tepo_megatron.dist.objects import all_gather_object, same_error
from tepo_megatron.dist.parallel import Axis, ParallelDims
from tepo_megatron.models import hf_io
from tepo_megatron.models.families import Family, WeightMapping, check_tokenizer
from tepo_megatron.models.hf_io import check_tensors
from tepo_megatron.models.ops import Architecture, Replicated

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
# SequentialMLP has one module per expert; TEGroupedMLP (Transformer Engine) has one weight per expert.
_EXPERT = re.compile(r"experts\.(?:local_experts\.(?P<module>\d+)\.)?(?P<layer>linear_fc[12])\.weight(?P<weight>\d*)$")
# Transformer Engine fuses the norm before a linear layer into it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}

_FAULTS = (CheckpointError, RunReplacedError, OSError)  # of an export, on any rank


@dataclass(frozen=True)
class Binding:
    """One parameter of this rank and the HF tensors that it is made of."""

    name: str  # in the whole model
    parameter: torch.nn.Parameter  # this rank's tensor-parallel shard
    row: WeightMapping
    hf_names: tuple[str, ...]  # names of its HF tensors, in the order of the row

    @property
    def of_expert(self) -> bool:
        """Return whether the parameter belongs to an expert, so that expert-parallel ranks hold different ones."""
        return "{expert}" in self.row.megatron


def bind(chunks: Sequence[torch.nn.Module], family: Family, arch: Architecture) -> list[Binding]:
    """Return a binding for every parameter of this rank. Raises ConversionError if a parameter has no row in the table of the
    family.
    """
    rows = {row.megatron: row for row in family.rows}
    bindings = []
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            pattern, layer, expert = _place(chunk, local_name)
            name = pattern.format(layer=layer, expert=expert)
            if pattern not in rows:
                raise ConversionError(f"parameter {name} has no row in the table of family {family.name}")
            row = rows[pattern]
            if name == "output_layer.weight" and arch.tied_embeddings:
                hf_names: tuple[str, ...] = (family.embedding,)  # the last stage's copy of a tied embedding
            else:
                hf_names = tuple(n.format(layer=layer, expert=expert) for n in row.hf)
            bindings.append(Binding(name, parameter, row, hf_names))
    return bindings


def load_hf(bindings: Sequence[Binding], reader: hf_io.HfReader, family: Family, arch: Architecture, tp: Axis) -> None:
    """Fill this rank's parameters from a HF directory, in place, tensor by tensor.

    Raises:
        ConversionError: a tensor is missing, left over, not finite or of the wrong shape, the output layer contradicts tied
            embeddings, or the tokenizer has ids beyond the embedding.
        CheckpointError: a file is missing or damaged.
    """
    check_tokenizer(reader.path, arch.vocab_size)
    check_tensors(reader, family, arch)
    for b in bindings:
        try:
            shard = b.row.op.shard([reader.get(n) for n in b.hf_names], arch, tp.size, tp.rank)
        except (RuntimeError, ValueError) as e:  # shapes of a view or a concatenation do not fit
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


def sent_by(bindings: Sequence[Binding], groups: ParallelDims) -> list[Binding]:
    """Return the parameters whose tensors leave the model through this rank's tensor-parallel group.

    Over all groups, each tensor leaves through exactly one.
    """
    return [b for b in bindings if (groups.is_first_expert_replica if b.of_expert else groups.is_first_replica)]


def iterate_hf(bindings: Sequence[Binding], arch: Architecture, tp: Axis) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole HF tensors of these parameters, by name, on tensor-parallel rank 0 only; other ranks yield nothing.

    All ranks of a tensor-parallel group must iterate to the end. Collectives: one gather over tp for each parameter that is
    split. A tied embedding appears once, from the first pipeline stage.
    """
    for b in bindings:
        if b.name == "output_layer.weight" and arch.tied_embeddings:
            continue
        if shards := _gather_shards(b, tp):
            yield from zip(b.hf_names, b.row.op.unshard(shards, arch), strict=True)


def export_hf(
    bindings: Sequence[Binding],
    family: Family,
    arch: Architecture,
    groups: ParallelDims,
    base: Path,
    out: Path,
    check_in_place: Callable[[], object] = lambda: None,
    stop_token_ids: Sequence[int] = (),
) -> None:
    """Write the model as a HF directory, which appears complete or not at all.

    All ranks call it. The ranks that own tensors write them to files of their own; rank 0 writes config, tokenizer and index,
    and the tensors of the base model that the family carries over.
    Collectives: those of `iterate_hf`, and four all-gathers of objects over the host group.

    Args:
        stop_token_ids: see `hf_io.carry_over`.
    Raises:
        CheckpointError: on every rank, naming the rank and the file, when one rank cannot write or `check_in_place` fails.
    """
    temporary = out.with_name(out.name + ".partial")
    with same_error(groups.host, _FAULTS, CheckpointError):
        if groups.is_main:
            check_in_place()
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    mine: tuple[dict[str, list[str]], int] = ({}, 0)
    with same_error(groups.host, _FAULTS, CheckpointError):
        if sent := sent_by(bindings, groups):
            tensors = iterate_hf(sent, arch, groups.tp)
            stream = _Counted(tensors)
            try:
                written = hf_io.write_shards(stream, temporary, f"model-{groups.owner}", limit=4 * 2**30)
            except (CheckpointError, OSError):
                collections.deque(tensors, maxlen=0)  # the other ranks of its tensor-parallel group still gather the rest
                raise
            mine = (written, stream.bytes)
    everything = list(all_gather_object(mine, groups.host))
    with same_error(groups.host, _FAULTS, CheckpointError):
        if groups.is_main:
            carried = _Counted(iter(hf_io.CarriedTensors(base, family.carries)))
            carried_files = hf_io.write_shards(carried, temporary, "carried", limit=4 * 2**30)
            everything.append((carried_files, carried.bytes))
            all_files = {file: names for files, _ in everything for file, names in files.items()}
            hf_io.write_index(temporary, all_files, total_bytes=sum(size for _, size in everything))
            hf_io.carry_over(base, temporary, next(iter(bindings)).parameter.dtype, stop_token_ids)
            check_in_place()
            with writing(temporary):
                hf_io.publish(temporary, out)


class _Counted:
    """A stream of named tensors that counts their bytes."""

    def __init__(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        self._stream, self.bytes = stream, 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._stream:
            self.bytes += tensor.nbytes
            yield name, tensor


def _gather_shards(binding: Binding, tp: Axis) -> list[Tensor]:
    """Return the shards of all tensor-parallel ranks, on rank 0; elsewhere an empty list."""
    shard = binding.parameter.detach()
    if tp.size == 1 or isinstance(binding.row.op, Replicated):
        return [shard] if tp.rank == 0 else []
    shards = [torch.empty_like(shard) for _ in range(tp.size)] if tp.rank == 0 else []
    dist.gather(shard.contiguous(), shards or None, group_dst=0, group=tp.group)
    return shards


def _place(chunk: torch.nn.Module, name: str) -> tuple[str, int, int]:
    """Return the parameter's name in the table, and the indices of its layer and expert in the whole model (0 if none)."""
    for fused, plain in _FUSED_NORMS.items():
        name = name.replace(fused, plain)
    if (match := _LAYER.match(name)) is None:
        return name, 0, 0
    layer = chunk.decoder.layers[int(match.group(1))]
    name, expert = _LAYER.sub("decoder.layers.{layer}.", name, count=1), 0
    if match := _EXPERT.search(name):
        expert = layer.mlp.local_expert_indices[int(match["module"] or match["weight"])]
        name = _EXPERT.sub(r"experts.{expert}.\g<layer>.weight", name)
    return name, layer.layer_number - 1, expert
