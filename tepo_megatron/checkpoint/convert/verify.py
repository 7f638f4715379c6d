"""Verify that a Megatron checkpoint is a given Hugging Face model: compare all bits, and what both models compute."""

import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tepo_megatron.base.errors import ConversionError
from tepo_megatron.base.restricted_pickle import restricted_loading
from tepo_megatron.checkpoint.convert import HF_FOLDER
from tepo_megatron.checkpoint.convert.directories import progress_bar
from tepo_megatron.checkpoint.convert.dist_reader import DistCheckpointReader, read_common
from tepo_megatron.checkpoint.convert.exporting import hf_tensors, plan_of
from tepo_megatron.checkpoint.convert.importing import read_plan
from tepo_megatron.checkpoint.convert.plan import world_of_one
from tepo_megatron.config import ModelConfig, ParallelConfig
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.models.families import read_config
from tepo_megatron.models.hf_io import CarriedTensors, HfReader, bitwise_equal
from tepo_megatron.models.ops import Architecture

TEXT = "Find all real x with x^2 - 5x + 6 = 0. Since (x - 2)(x - 3) = 0, the answer is \\boxed{2, 3}."
# Largest ||megatron - hf|| / ||hf|| of hidden states and logits. fp32: about ten times the effect of rounding in models of 1 to
# 14 billion parameters; a wrong layer is off by 1e-2 or more. bf16: each rounding is up to 2^-9.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class VerifyResult:
    """The result of a verification."""

    tensors: int
    differing: tuple[str, ...]  # those that are not bitwise equal
    # relative error of each layer's output and of the logits, by name, in the order of computation
    errors: tuple[tuple[str, float], ...]
    tokens: int
    agreement: float  # share of tokens for which both models have the same most likely next token
    tolerance: float

    @property
    def first_wrong_layer(self) -> str | None:
        """Return the first layer whose error exceeds the tolerance or is not finite; None if all pass."""
        return next((name for name, error in self.errors if not error <= self.tolerance), None)

    @property
    def passed(self) -> bool:
        """Return whether all tensors are equal and all outputs agree."""
        return not self.differing and self.first_wrong_layer is None


def verify(source: Path, checkpoint: Path, text: str = TEXT, precision: str = "fp32") -> VerifyResult:
    """Compare every tensor, then load one model after the other (each whole in memory) and compare their outputs on a text.

    Args:
        precision: "fp32" or "bf16", of both models.
    Raises:
        ConversionError, CheckpointError: one of them is damaged, or they have different architectures.
    """
    carried = checkpoint / HF_FOLDER if (checkpoint / HF_FOLDER / "config.json").exists() else source
    with world_of_one() as groups:
        source_reader, reader = HfReader(source), DistCheckpointReader(checkpoint)
        read_plan(source, read_config(source), source_reader, groups)
        plan = plan_of(checkpoint, read_config(carried), reader, groups)
        count, differing = 0, []
        sizes = source_reader.shapes()
        with progress_bar("compare", sum(t.nbytes for t in sizes.values())) as advance:
            for slot in plan.slots:
                for key, tensor in zip(slot.hf_names, hf_tensors(slot, reader), strict=True):
                    if key not in sizes:
                        raise ConversionError(f"{source}: tensor {key} of {checkpoint} is not in it; they are different models")
                    count += 1
                    if not bitwise_equal(tensor, source_reader.get(key)):
                        differing.append(key)
                    advance(sizes[key].nbytes)
                del tensor
        kept, wanted = (CarriedTensors(folder, plan.family.carries) for folder in (carried, source))
        count += len(wanted.names)
        differing += [n for n in wanted.names if n not in kept.names or not bitwise_equal(kept.get(n), wanted.get(n))]
        tokens = _tokens(source, text, plan.arch.vocab_size, plan.arch.max_positions)
        theirs = _hf_outputs(source, tokens, _DTYPES[precision])
        gc.collect()
        ours = _megatron_outputs(checkpoint, plan.arch, groups, tokens, precision)
    if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in theirs):
        raise ConversionError(f"{checkpoint} and {source} differ in layers or sizes; they are different models")
    errors = [(name, _error(ours[name], expected)) for name, expected in theirs.items()]
    same = (ours["logits"].argmax(-1) == theirs["logits"].argmax(-1)).double().mean().item()
    return VerifyResult(count, tuple(differing), tuple(errors), tokens.numel(), same, TOLERANCE[precision])


def _tokens(source: Path, text: str, vocab_size: int, max_positions: int) -> Tensor:
    """Return the text as token ids, int64 [1, S]; without a tokenizer, ids that are spread over the vocabulary."""
    ids: Sequence[int] = []
    if (source / "tokenizer_config.json").exists() or (source / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(source)(text)["input_ids"]
    if not ids:
        ids = torch.linspace(0, vocab_size - 1, 64).long().tolist()
    return torch.tensor([ids[:max_positions]])


@torch.no_grad()
def _hf_outputs(source: Path, tokens: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the fp32 outputs [S, ...] of the HF model's embedding, layers and output layer, by name."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa").eval()
    except (OSError, ValueError, RuntimeError, KeyError) as e:
        raise ConversionError(f"{source}: transformers cannot load the model ({e})") from None
    outputs: dict[str, Tensor] = {}
    _keep(model.get_input_embeddings(), "embedding", outputs)
    for i, layer in enumerate(model.get_decoder().layers):
        _keep(layer, f"layer {i}", outputs)
    outputs["logits"] = model(tokens).logits[0].float()
    return outputs


@torch.no_grad()
def _megatron_outputs(
    checkpoint: Path, arch: Architecture, groups: ParallelDims, tokens: Tensor, precision: str
) -> dict[str, Tensor]:
    from megatron.core import dist_checkpointing

    from tepo_megatron.actor import build

    model = ModelConfig(path="", precision=precision)  # type: ignore[arg-type]
    config = build.transformer_config(arch, model, ParallelConfig(), groups.device)
    (chunk,) = build.build_chunks(config, arch, model, groups)
    # Megatron's own loader, as a trainer would use it: an error in this package's reader cannot hide here
    content = read_common(checkpoint).get("content_metadata")
    with warnings.catch_warnings(), restricted_loading():
        warnings.filterwarnings("ignore", category=FutureWarning)  # Megatron-Core calls functions that PyTorch will rename
        loaded = dist_checkpointing.load({"model": chunk.sharded_state_dict(metadata=content)}, str(checkpoint))
    chunk.load_state_dict(loaded["model"])
    chunk.eval()
    outputs: dict[str, Tensor] = {}
    _keep(chunk.embedding, "embedding", outputs, sequence_first=True)
    for i, layer in enumerate(chunk.decoder.layers):
        _keep(layer, f"layer {i}", outputs, sequence_first=True)
    outputs["logits"] = chunk(tokens, torch.arange(tokens.size(1))[None], None)[0, :, : arch.vocab_size].float()
    return outputs


def _keep(module: torch.nn.Module, name: str, outputs: dict[str, Tensor], sequence_first: bool = False) -> None:
    """Store the module's output, fp32 [S, hidden], under `name` whenever it has run."""

    def hook(_: torch.nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        outputs[name] = (hidden[:, 0] if sequence_first else hidden[0]).detach().float()

    module.register_forward_hook(hook)


def _error(a: Tensor, b: Tensor) -> float:
    """Return ||a - b|| / ||b||, with 2-norms in fp64."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
