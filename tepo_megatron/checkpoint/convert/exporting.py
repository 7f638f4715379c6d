"""Export a Megatron-Core checkpoint, whatever layout wrote it, to a Hugging Face directory."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from tepo_megatron.base.errors import ConversionError
from tepo_megatron.checkpoint.convert.directories import Advance, carried_folder, new_directory, progress_bar
from tepo_megatron.checkpoint.convert.dist_reader import DistCheckpointReader, read_common
from tepo_megatron.checkpoint.convert.importing import check_finite
from tepo_megatron.checkpoint.convert.plan import ConversionPlan, ParameterSlot, make_plan, world_of_one
from tepo_megatron.checkpoint.saving import RUN
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.models import fp8
from tepo_megatron.models.families import read_config
from tepo_megatron.models.hf_io import CarriedTensors, carry_over, set_config, write_index, write_shards

FILE_BYTES = 2**30  # most bytes of a file, whose tensors are in memory while it is written


@dataclass(frozen=True)
class ExportFormat:
    """The dtypes of an exported model."""

    dtype: torch.dtype | None = None  # dtype of all tensors; None: as they are stored
    fp8_blockwise: bool = False  # store the linear layers of the decoder in blockwise FP8 (models/fp8.py)

    def convert(self, slot: ParameterSlot, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Return what is written for one HF tensor: named tensors, more than one if it is quantized.

        Args:
            tensor: the whole HF tensor; on the meta device, only shapes and dtypes are computed.
        Raises:
            ConversionError: a value is not finite in the new dtype.
        """
        if self.fp8_blockwise and fp8.is_quantized(slot.binding.row.op, name, tensor):
            return fp8.parts(slot.binding.row.op, name, tensor)
        cast = tensor if self.dtype is None else tensor.to(self.dtype)
        if cast.dtype != tensor.dtype and not cast.is_meta:
            check_finite(cast, f"{name} in {str(self.dtype).removeprefix('torch.')} (give another --dtype, or none) would")
        return [(name, cast)]


def export_hf(checkpoint: Path, out: Path, form: ExportFormat = ExportFormat(), base: Path | None = None) -> int:  # noqa: B008
    """Write the model of a Megatron checkpoint to a HF directory, and return the bytes of tensors written.

    It takes the memory of the tensors of one file, 1 GiB, or of one larger tensor. Tensors that the family carries over are
    copied from the folder that has config and tokenizer, in their dtype. generation_config.json gets the stop tokens of the run
    whose checkpoint it is.

    Args:
        form: the dtypes to write.
    Raises:
        ConversionError: the model is not supported, or its tensors do not fit or are not finite. The message names file and
            tensor.
        CheckpointError: a file is missing or damaged, or `out` cannot be written.
    """
    folder = carried_folder(checkpoint, base)
    hf_config = read_config(folder)
    with world_of_one() as groups:
        reader = DistCheckpointReader(checkpoint)
        plan = plan_of(checkpoint, hf_config, reader, groups)
        announced = {name: t for slot in plan.slots for name, t in _announced(slot, reader, form).items()}
        carried = CarriedTensors(folder, plan.family.carries)
        announced |= carried.shapes()
        total = sum(t.nbytes for t in announced.values())
        with new_directory(out, total) as filling, progress_bar("export", total) as advance:
            written = write_shards(_written(plan, reader, form, carried, advance), filling, "model", FILE_BYTES)
            write_index(filling, written, total)
            carry_over(folder, filling, stop_token_ids=_stop_tokens_of_run(checkpoint))
            set_config(filling, _config_changes(plan, announced, hf_config))
    return total


def _stop_tokens_of_run(checkpoint: Path) -> list[int]:
    """Return `rollout.stop_token_ids` of the run that saved this checkpoint; none if an import or another trainer made it."""
    run = checkpoint / RUN
    return json.loads(run.read_bytes()).get("stop_token_ids", []) if run.exists() else []


def _written(
    plan: ConversionPlan, reader: DistCheckpointReader, form: ExportFormat, carried: CarriedTensors, advance: Advance
) -> Iterator[tuple[str, Tensor]]:
    """Yield all HF tensors with their names, converted."""
    for slot in plan.slots:
        for name, tensor in zip(slot.hf_names, hf_tensors(slot, reader), strict=True):
            for part, data in form.convert(slot, name, tensor):
                yield part, data
                advance(data.nbytes)
    for name, tensor in carried:
        yield name, tensor
        advance(tensor.nbytes)


def plan_of(
    checkpoint: Path, hf_config: Mapping[str, Any], reader: DistCheckpointReader, groups: ParallelDims
) -> ConversionPlan:
    """Return the plan of a Megatron checkpoint, after a check that its tensors are those of its config.json.

    Raises:
        ConversionError: a tensor is missing, left over or of another shape, or the model is not supported.
    """
    plan = make_plan(hf_config, groups, read_common(checkpoint).get("content_metadata"))
    expected = {p.key: p for slot in plan.slots for p in slot.pieces(slot.binding.parameter.detach())}
    for key, piece in expected.items():
        if key not in reader.tensors:
            raise ConversionError(f"{checkpoint}: tensor {key} is missing; the checkpoint does not belong to config.json")
        stored = reader.tensors[key].size
        fits = stored == torch.Size(piece.global_shape)
        if piece.allow_shape_mismatch:  # the vocabulary may be padded for another number of ranks
            fits = stored[0] >= plan.arch.vocab_size and stored[1:] == torch.Size(piece.global_shape[1:])
        if not fits:
            raise ConversionError(
                f"{checkpoint}: tensor {key} has the shape {tuple(stored)}, "
                f"but config.json asks for {tuple(piece.global_shape)}"
            )
    roots = {key.split(".")[0] for key in expected}  # keys of the optimizer's state begin otherwise
    if extra := {key for key in reader.tensors if key.split(".")[0] in roots} - expected.keys():
        raise ConversionError(
            f"{checkpoint}: tensor {min(extra)} (and {len(extra) - 1} more) has no place in a model of this config.json"
        )
    return plan


def hf_tensors(slot: ParameterSlot, reader: DistCheckpointReader) -> list[Tensor]:
    """Return the HF tensors of a parameter in their stored dtype, contiguous. Raises ConversionError for one not finite."""
    parameter = read_parameter(slot, reader)
    check_finite(parameter, f"{reader.directory}: {slot.binding.name}")
    return [t.contiguous() for t in slot.to_hf(parameter)]


def read_parameter(slot: ParameterSlot, reader: DistCheckpointReader) -> Tensor:
    """Return a whole Megatron parameter."""
    announced = slot.pieces(slot.binding.parameter.detach())
    if len(announced) == 1:
        return _read(announced[0], reader)
    parameter = torch.empty(slot.shape, dtype=reader.tensors[announced[0].key].properties.dtype)
    pieces = slot.pieces(parameter)
    for piece in pieces:
        piece.data.copy_(_read(piece, reader))
    return slot.merged(parameter, pieces)


def _read(piece: ShardedTensor, reader: DistCheckpointReader) -> Tensor:
    """Read the data of one piece."""
    shape = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
    return reader.region(piece.key, piece.global_offset, shape).view(piece.local_shape)


def _announced(slot: ParameterSlot, reader: DistCheckpointReader, form: ExportFormat) -> dict[str, Tensor]:
    """Return the tensors that will be written for a parameter, by name, on the meta device."""
    announced: dict[str, Tensor] = {}
    for name, tensor in zip(slot.hf_names, slot.to_hf(_stored(slot, reader)), strict=True):
        announced.update(form.convert(slot, name, tensor))
    return announced


def _stored(slot: ParameterSlot, reader: DistCheckpointReader) -> Tensor:
    """Return the Megatron parameter in the dtype of the checkpoint, on the meta device."""
    parameter = slot.binding.parameter.detach()
    return parameter.to(reader.tensors[slot.pieces(parameter)[0].key].properties.dtype)


def _config_changes(plan: ConversionPlan, announced: Mapping[str, Tensor], hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that must change to describe the written tensors."""
    sizes: Counter[torch.dtype] = Counter()
    for name, tensor in announced.items():
        if tensor.dtype != torch.float8_e4m3fn and not name.endswith(fp8.SCALE_SUFFIX):
            sizes[tensor.dtype] += math.prod(tensor.shape)
    field = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
    changes: dict[str, Any] = {field: str(sizes.most_common(1)[0][0]).removeprefix("torch.")}
    if any(name.endswith(fp8.SCALE_SUFFIX) for name in announced):
        full = [n.removesuffix(".weight") for n in announced if n.endswith(".weight") and n + fp8.SCALE_SUFFIX not in announced]
        changes["quantization_config"] = fp8.config([*full, *(["lm_head"] if plan.arch.tied_embeddings else [])])
    return changes
