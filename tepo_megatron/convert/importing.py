"""Import a Hugging Face directory as a Megatron-Core checkpoint that loads on any layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.convert import HF_FOLDER
from tepo_megatron.convert.dist_writer import DistCheckpointWriter
from tepo_megatron.convert.output import new_directory
from tepo_megatron.convert.plan import ConversionPlan, make_plan
from tepo_megatron.convert.progress import progress_bar
from tepo_megatron.convert.world import world_of_one
from tepo_megatron.errors import ConversionError
from tepo_megatron.weights.families import check_tokenizer, read_config
from tepo_megatron.weights.fit import check_tensors
from tepo_megatron.weights.hf_io import CarriedTensors, HfReader, carry_over, write_shards

CARRIED_FILE = 512 * 2**20  # most bytes of a file of carried tensors, which is in memory while it is written


def import_hf(source: Path, out: Path) -> int:
    """Write a HF model as a torch_dist checkpoint, every tensor in its dtype, and return the bytes of tensors written.

    Peak memory is the program itself and the tensors of one parameter (HF's, and Megatron's if it is not the same tensor).
    Tensors that the family carries over are copied to the folder of config.json and tokenizer.

    Raises:
        ConversionError: the model is not supported, or its tensors do not fit or are not finite. The message names file and
            tensor.
        CheckpointError: a file is missing or damaged, or `out` cannot be written.
    """
    hf_config = read_config(source)
    with world_of_one() as groups:
        reader = HfReader(source)
        plan = read_plan(source, hf_config, reader, groups)
        tensors = reader.shapes()
        for slot in plan.slots:
            # on the meta device: this checks shapes and dtypes before anything is written
            slot.from_hf([tensors[n] for n in slot.hf_names])
        sizes = [sum(tensors[n].nbytes for n in slot.hf_names) for slot in plan.slots]
        carried = CarriedTensors(source, plan.family.carries)
        total = sum(sizes) + sum(t.nbytes for t in carried.shapes().values())
        with new_directory(out, total) as filling, progress_bar("import", total) as advance:
            (filling / HF_FOLDER).mkdir()
            carry_over(source, filling / HF_FOLDER)
            write_shards(carried, filling / HF_FOLDER, "carried", CARRIED_FILE)
            advance(total - sum(sizes))
            writer = DistCheckpointWriter(filling)
            for kept in plan.objects:
                writer.add_object(kept)
            for slot in plan.slots:
                parameter = slot.from_hf([reader.get(n) for n in slot.hf_names])
                check_finite(parameter, f"{reader.path}: {', '.join(slot.hf_names)}")
                for piece in slot.pieces(parameter):
                    writer.add(piece)
                advance(parameter.nbytes)
                del parameter
            writer.finish({})
    return total


def read_plan(source: Path, hf_config: Mapping[str, Any], reader: HfReader, groups: Any) -> ConversionPlan:
    """Return the plan of a HF directory, after a check that its tensors and its tokenizer fit its config.json.

    Raises:
        ConversionError: the model is quantized or not supported, a tensor is missing or left over, or the tokenizer has ids
            beyond the vocabulary.
    """
    if "quantization_config" in hf_config:
        raise ConversionError(
            f"{source / 'config.json'}: the weights are quantized (quantization_config), which is not read; "
            "give the checkpoint from which they were made"
        )
    plan = make_plan(hf_config, groups)
    check_tokenizer(source, plan.arch.vocab_size)
    check_tensors(reader, plan.family, plan.arch)
    return plan


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise ConversionError when a value is infinite or NaN."""
    # A sum is several times faster than a test of each value. It is not finite if a value is not, but may also overflow.
    if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
        raise ConversionError(f"{what} hold values that are not finite; the file is damaged, or the model has diverged")
