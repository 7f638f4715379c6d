"""Precision presets and memory options: the Megatron fields that they set, and the hardware and shapes that they require.

This is the only module that turns `model.precision`, `training.recompute` and the checked fields of `megatron.*` into fields of
Megatron's configs (named alike in 0.16 to 0.19). The checks need no Megatron and run before
any process is started.

FP8 covers the products of the layers' linear modules, forward and backward: qkv, attention output, MLP, experts. Not in FP8 are
the embedding and the output layer (Megatron's own, not Transformer Engine's), and therefore log-probs and entropies; norms; the
router (fp32); softmax and attention. Parameters are bf16, gradients are reduced in fp32, the optimizer's masters are fp32.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tepo_megatron.actor.layout import stage_layers
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import MegatronConfig, ModelConfig, ParallelConfig, Precision, TrainingConfig
from tepo_megatron.models.ops import Architecture
from tepo_megatron.ops.alignment import Alignment

Version = tuple[int, int]


@dataclass(frozen=True)
class Fp8:
    """An FP8 scaling preset."""

    recipe: Literal["tensorwise", "blockwise"]  # Megatron's `fp8_recipe`
    format: Literal["hybrid", "e4m3"]  # number format. hybrid: e4m3, with gradients in e5m2.
    scale: str  # the elements that share one scale, for the documentation
    tokens: int  # the tokens of a rank must be a multiple of this (16 for cuBLAS, 128 for the blocks)
    widths: int  # the sizes of a rank's weights must be multiples of this
    transformer_engine: Version  # first version of Transformer Engine that has it
    cuda: Version = (12, 1)  # first version of CUDA that has it


PRESETS: dict[Precision, Fp8 | None] = {
    "fp32": None,
    "bf16": None,
    "fp8-current": Fp8("tensorwise", "hybrid", "a tensor, from its own maximum", 16, 16, (2, 2)),
    "fp8-blockwise": Fp8(
        "blockwise", "e4m3", "128 channels of a token, 128 x 128 of a weight", 128, 128, (2, 3), cuda=(12, 9)
    ),
}  # fmt: skip
_MEGATRON = MegatronConfig()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.uint8}  # uint8: Megatron's and TE's type for FP8


@dataclass(frozen=True)
class Hardware:
    """A device and its software."""

    name: str
    capability: Version | None
    transformer_engine: Version | None = None
    cuda: Version | None = None


# each GPU with the versions that requirements/gpu-*.txt pin
PROFILES = (
    Hardware("H100", (9, 0), (2, 20), (13, 0)),
    Hardware("H200", (9, 0), (2, 20), (13, 0)),
    Hardware("B200", (10, 0), (2, 20), (13, 0)),
    Hardware("CPU", None),
)


def transformer_fields(model: ModelConfig, megatron: MegatronConfig = _MEGATRON) -> dict[str, Any]:
    """Return the fields of TransformerConfig for the precision preset."""
    dtype = DTYPES[model.dtype]
    fields: dict[str, Any] = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": model.dtype == "bf16"}
    if (fp8 := PRESETS[model.precision]) is None:
        return fields
    start, end = megatron.bf16_layers
    return fields | {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": False,  # loading, sending and offloading copy parameters as bf16
        "fp8_wgrad": True,
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
        "first_last_layers_bf16": start + end > 0,
        "num_layers_at_start_in_bf16": start,
        "num_layers_at_end_in_bf16": end,
    }


def recompute_fields(training: TrainingConfig, experts: bool) -> dict[str, Any]:
    """Return the fields of TransformerConfig for recomputation in backward."""
    if training.recompute == "none":
        return {}
    if training.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"] if experts else ["mlp"]}


def ddp_fields(megatron: MegatronConfig, platform: str) -> dict[str, Any]:
    """Return the fields of DistributedDataParallelConfig."""
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": True,
        "average_in_collective": False,  # gradients are divided once, by the token count
        "overlap_grad_reduce": megatron.reduces_early(platform),
        "overlap_param_gather": megatron.gathers_late(platform),
        "bucket_size": megatron.known_ddp.bucket_size,
        "fp8_param_gather": False,
    }


def optimizer_fields(model: ModelConfig, megatron: MegatronConfig, platform: str) -> dict[str, Any]:
    """Return the fields of Megatron's OptimizerConfig for precision, overlap, moments and offloading."""
    adam = megatron.known_optimizer
    fields: dict[str, Any] = {
        "params_dtype": DTYPES[model.dtype],
        "bf16": model.dtype == "bf16",
        "use_distributed_optimizer": True,
        "overlap_param_gather": megatron.gathers_late(platform),
        "main_params_dtype": torch.float32,
        "main_grads_dtype": torch.float32,
    }
    if adam.small_moments:
        fields |= {"use_precision_aware_optimizer": True}
        fields |= {"exp_avg_dtype": _MOMENTS[adam.exp_avg_dtype], "exp_avg_sq_dtype": _MOMENTS[adam.exp_avg_sq_dtype]}
    if adam.optimizer_offload_fraction:
        # Megatron offers its hybrid optimizer only together with the precision-aware one, whatever the precision
        fields |= {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
        fields |= {"optimizer_offload_fraction": adam.optimizer_offload_fraction, "overlap_cpu_optimizer_d2h_h2d": True}
    return fields


def alignment(model: ModelConfig, parallel: ParallelConfig, fixed_length: int = 0) -> Alignment:
    """Return the padding of packed tokens: in FP8 to a multiple of 16 or 128 of each tensor-parallel rank's part."""
    fp8 = PRESETS[model.precision]
    total = (fp8.tokens if fp8 else 1) * (parallel.tp if parallel.sequence_parallel else 1)
    return Alignment(parallel.cp, total, fixed_length)


def refusal(precision: Precision, hardware: Hardware) -> str | None:
    """Return the reason why a preset cannot run on this hardware, for a message; None if it can."""
    fp8, at = PRESETS[precision], hardware.capability
    if at is None:
        return None if fp8 is None else "FP8 products need a GPU"
    if precision != "fp32" and at < (8, 0):
        return f"bf16 needs compute capability 8.0, and this is {_dotted(at)}"
    if fp8 is None:
        return None
    least = (9, 0) if fp8.recipe == "blockwise" else (8, 9)
    if at < least:
        return f"it needs compute capability {_dotted(least)}, and this is {_dotted(at)}"
    if fp8.recipe == "blockwise" and at >= (10, 0):
        return "Transformer Engine emulates it there by MXFP8, which is another format: 32 values share a scale"
    for name, present, wanted in (
        ("Transformer Engine", hardware.transformer_engine, fp8.transformer_engine),
        ("CUDA", hardware.cuda, fp8.cuda),
    ):
        if present is None or present < wanted:
            return f"it needs {name} {_dotted(wanted)}, and {f'this is {_dotted(present)}' if present else 'there is none'}"
    return None


def check_hardware(model: ModelConfig, hardware: Hardware) -> None:
    """Raise ConfigError if the precision preset cannot run on this hardware."""
    if (reason := refusal(model.precision, hardware)) is not None:
        others: list[Precision] = [name for name in PRESETS if name != "fp32" and refusal(name, hardware) is None] or ["fp32"]
        raise ConfigError(f"model.precision={model.precision} on {hardware.name}: {reason}; use {' or '.join(others)}")


def check_shapes(
    arch: Architecture, model: ModelConfig, parallel: ParallelConfig, bf16_layers: tuple[int, int] = (0, 0)
) -> None:
    """Raise ConfigError if sizes of the model do not fit the precision preset on this mesh. The message names the size."""
    if (fp8 := PRESETS[model.precision]) is None:
        return
    for name, size in _widths(arch, parallel.tp).items():
        if size % fp8.widths:
            raise ConfigError(
                f"model.precision={model.precision} needs weights whose sizes are multiples of {fp8.widths}, and with "
                f"parallel.tp={parallel.tp} {name} is {size}; use a smaller tp, or {_less_strict(size)}"
            )
    most = min(stage_layers(arch.num_layers, parallel.pp), default=0)
    for end, number in zip(("start", "end"), bf16_layers, strict=True):
        if number > most:
            raise ConfigError(
                f"megatron.transformer.num_layers_at_{end}_in_bf16={number} exceeds the {most} layers of a pipeline stage, "
                f"which Megatron refuses; use at most {most}"
            )


def _widths(arch: Architecture, tp: int) -> dict[str, int]:
    queries = (1 + arch.attention_output_gate) * arch.num_heads
    widths = {
        "hidden_size": arch.hidden_size,
        "the width of its queries": arch.num_heads * arch.head_dim // tp,
        "the width of its queries, keys and values": (queries + 2 * arch.num_query_groups) * arch.head_dim // tp,
    }
    if (linear := arch.linear_attention) is not None:
        widths["the width of the gated delta rule's values"] = linear.value_heads * linear.value_dim // tp
        widths["the width of the gated delta rule's projection"] = sum(linear.projected) // tp
    if len(arch.sparse_layers) < arch.num_layers:
        widths["its part of ffn_size"] = arch.ffn_size // tp
    if arch.experts is not None:
        widths["its part of the experts' ffn_size"] = arch.experts.ffn_size // tp
    return widths


def _less_strict(size: int) -> str:
    fits = [name for name, fp8 in PRESETS.items() if fp8 is not None and math.gcd(size, fp8.widths) == fp8.widths]
    return f"model.precision={fits[-1]}" if fits else "model.precision=bf16"


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def table() -> str:
    """Return a Markdown table of the presets and the hardware that runs them, as in docs/precision.md."""
    rows = [["`model.precision`", "products of layers", "one scale for", "tokens padded to", *[p.name for p in PROFILES]]]
    rows.append(["---"] * len(rows[0]))
    notes: list[str] = []
    for name, fp8 in PRESETS.items():
        products = name if fp8 is None else "e4m3" + (", gradients e5m2" if fp8.format == "hybrid" else "")
        cells = [f"`{name}`", products, fp8.scale if fp8 else "-", str(fp8.tokens) if fp8 else "-"]
        for hardware in PROFILES:
            reason = refusal(name, hardware)
            if reason is not None and reason not in notes:
                notes.append(reason)
            cells.append("yes" if reason is None else f"no [{notes.index(reason) + 1}]")
        rows.append(cells)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"[{i}] {note}." for i, note in enumerate(notes, 1))])
