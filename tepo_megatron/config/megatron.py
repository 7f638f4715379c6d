"""Fields of Megatron-Core's configs: those that a run passes through with their checks, and those that this project owns.

A config that passes an owned field through would contradict a key of this project, or break a rule that the loss depends on.
Nothing here imports Megatron. Names and types of the fields without a check are checked in `actor/passed_fields.py`, before any
process is started.
"""

import dataclasses
import typing
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tepo_megatron.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, config, default_of
from tepo_megatron.config.model import ModelConfig, ParallelConfig

_NETWORK = "it follows from config.json in model.path"
_PRECISION = "it follows from model.precision"
_RECOMPUTE = "it follows from training.recompute"
_LENGTHS = "packed microbatches differ in length"
_FUSION = "the layers of this project need one value"
_INITIALIZATION = "the weights of model.path overwrite all weights"
_HOOK = "the training step sets this function"
_DISTRIBUTED = "gradients are summed in fp32, and masters and moments are divided over dp x cp"

OWNED: Mapping[str, Mapping[str, str]] = {
    "transformer": {
        **dict.fromkeys((
            "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
            "normalization", "layernorm_epsilon", "qk_layernorm", "gated_linear_unit", "activation_func", "add_bias_linear",
            "add_qkv_bias", "softmax_scale", "num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk",
            "moe_router_pre_softmax",
        ), _NETWORK),
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), "dropout would change every log-prob; it is 0"),
        "tensor_model_parallel_size": "it is parallel.tp",
        "pipeline_model_parallel_size": "it is parallel.pp",
        "virtual_pipeline_model_parallel_size": "it is parallel.vpp",
        "context_parallel_size": "it is parallel.cp",
        "expert_model_parallel_size": "it is parallel.ep",
        "expert_tensor_parallel_size": "it is parallel.tp",
        "sequence_parallel": "it is parallel.sequence_parallel",
        **dict.fromkeys(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
                        "it follows from parallel.pp"),
        **dict.fromkeys(("variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm"), _LENGTHS),
        **dict.fromkeys((
            "params_dtype", "pipeline_dtype", "bf16", "fp16", "fp8", "fp8_recipe", "fp8_param", "fp8_wgrad",
            "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_amax_history_len", "fp8_amax_compute_algo",
        ), _PRECISION),
        **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"), _RECOMPUTE),
        **dict.fromkeys((
            "use_cpu_initialization", "perform_initialization", "init_method", "output_layer_init_method",
            "embedding_init_method",
        ), _INITIALIZATION),
        "calculate_per_token_loss": "gradients are divided once, by the token count of the whole minibatch",
        "moe_token_dispatcher_type": "packed microbatches of several stages need alltoall",
        "moe_enable_routing_replay": "it is rollout.replay_experts",
        "moe_router_dtype": "the choice of experts must not depend on bf16 rounding",
        **dict.fromkeys(("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
                        "the objective has no auxiliary loss of the routers"),
        "moe_grouped_gemm": "it follows from model.attention, which chooses the layers",
        **dict.fromkeys(("masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion", "apply_rope_fusion"),
                        _FUSION),
        **dict.fromkeys(("no_sync_func", "finalize_model_grads_func", "grad_scale_func"), _HOOK),
    },
    "ddp": {
        **dict.fromkeys(("grad_reduce_in_fp32", "use_distributed_optimizer"), _DISTRIBUTED),
        "average_in_collective": "gradients are divided once, by the token count of the whole minibatch",
        "fp8_param_gather": _PRECISION,
    },
    "optimizer": {
        "optimizer": "it is adam",
        "lr": "it is optimizer.lr",
        "min_lr": "the rate is constant after optimizer.warmup_steps",
        **dict.fromkeys(("params_dtype", "bf16", "fp16"), _PRECISION),
        **dict.fromkeys(("use_distributed_optimizer", "main_params_dtype", "main_grads_dtype"), _DISTRIBUTED),
        "overlap_param_gather": "it is megatron.ddp.overlap_param_gather",
        "use_precision_aware_optimizer": "it follows from exp_avg_dtype, exp_avg_sq_dtype and optimizer_offload_fraction",
        **dict.fromkeys(("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"),
                        "it follows from optimizer_offload_fraction"),
    },
}  # fmt: skip


MomentType = Literal["fp32", "bf16", "fp8"]


@config
class TransformerFields:
    """Fields of TransformerConfig that this project checks."""

    # Overlap the communication of sequence parallelism with products, in Transformer Engine. Pads all microbatches to
    # training.max_tokens_per_microbatch.
    tp_comm_overlap: bool = False
    # Add each product of a weight's gradient straight into the fp32 sum over microbatches. null: on GPUs, unless
    # training.offload_activations is on.
    gradient_accumulation_fusion: bool | None = None
    first_last_layers_bf16: bool = False  # Keep the first and the last layers in bf16 under model.precision=fp8-*.
    num_layers_at_start_in_bf16: NonNegative = 1  # Number of first layers that stay in bf16.
    num_layers_at_end_in_bf16: NonNegative = 1  # Number of last layers that stay in bf16.


@config
class DdpFields:
    """Fields of DistributedDataParallelConfig that this project checks."""

    overlap_grad_reduce: bool | None = None  # Reduce gradients bucket by bucket during backward. null: on GPUs.
    # Gather parameters bucket by bucket during the next forward pass. null: on GPUs.
    overlap_param_gather: bool | None = None
    bucket_size: Positive | None = None  # Parameters per gradient bucket. null: Megatron's max(40M, 1M x dp x cp).

    def __post_init__(self) -> None:
        if self.overlap_param_gather and self.overlap_grad_reduce is False:
            raise ValueError(
                "overlap_param_gather=true needs overlap_grad_reduce=true, which makes the buckets that it gathers; set that "
                "to true, or this to false"
            )


@config
class OptimizerFields:
    """Fields of OptimizerConfig that this project checks."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # Decay rate of the first moment.
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95  # Decay rate of the second moment.
    adam_eps: PositiveFloat = 1e-8  # Added to the square root of the second moment.
    weight_decay: NonNegativeFloat = 0.0  # Decoupled weight decay. One-dimensional parameters have none.
    clip_grad: NonNegativeFloat = 1.0  # Largest 2-norm of the gradient; a larger gradient is scaled down. 0: no clipping.
    exp_avg_dtype: MomentType = "fp32"  # Type of the first moment. Other types than fp32 need Transformer Engine.
    exp_avg_sq_dtype: MomentType = "fp32"  # Type of the second moment. Other types than fp32 need Transformer Engine.
    # Share of masters and moments that are kept and updated in host memory. Above 0 it needs Transformer Engine.
    optimizer_offload_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0

    def __post_init__(self) -> None:
        if self.optimizer_offload_fraction and self.small_moments:
            raise ValueError(
                f"{self.small_moments} and optimizer_offload_fraction={self.optimizer_offload_fraction:g}: the optimizer of "
                "the host knows fp32 only; set the moments to fp32, or optimizer_offload_fraction to 0"
            )

    @property
    def small_moments(self) -> str:
        """Return the fields whose moments are not fp32, for messages; empty if there are none."""
        held = {"exp_avg_dtype": self.exp_avg_dtype, "exp_avg_sq_dtype": self.exp_avg_sq_dtype}
        return ", ".join(f"{name}={kind}" for name, kind in held.items() if kind != "fp32")


CHECKED: Mapping[str, Any] = {"transformer": TransformerFields, "ddp": DdpFields, "optimizer": OptimizerFields}
# the fields that tests/gate trains with; a test compares
TESTED: Mapping[str, frozenset[str]] = {
    "transformer": frozenset({"gradient_accumulation_fusion"}),
    "ddp": frozenset({"overlap_grad_reduce", "overlap_param_gather", "bucket_size"}),
    "optimizer": frozenset({"adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad"}),
}


def _check_fields(section: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a section. Raise ValueError for fields that this project sets, and for values that it refuses."""
    for name in fields:
        if name in OWNED[section]:
            raise ValueError(f"{name} is set by this project: {OWNED[section][name]}; remove it here")
    _known(section, fields)
    return fields


def _known(section: str, fields: Mapping[str, Any]) -> Any:
    """Return the fields of a section that the project checks, with their defaults."""
    cls = CHECKED[section]
    names = {f.name for f in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in fields.items() if name in names})


@config
class MegatronConfig:
    """Fields of Megatron-Core's configs, passed through by their names there, with values that YAML can write.

    A field that this project sets itself is refused with the key that owns it. A name that the installed Megatron-Core does not
    have, and a value of another type, are refused before any process is started. `tepo doctor` and the start of a run list the
    fields that no test of this project trains with.
    """

    # Fields of `TransformerConfig`, such as `{moe_permute_fusion: true}`.
    transformer: Annotated[dict[str, Any], AfterValidator(partial(_check_fields, "transformer"))] = Field(default_factory=dict)
    # Fields of `DistributedDataParallelConfig`, such as `{bucket_size: 100000000}`.
    ddp: Annotated[dict[str, Any], AfterValidator(partial(_check_fields, "ddp"))] = Field(default_factory=dict)
    # Fields of `OptimizerConfig`, such as `{adam_beta2: 0.99}`.
    optimizer: Annotated[dict[str, Any], AfterValidator(partial(_check_fields, "optimizer"))] = Field(default_factory=dict)

    @property
    def known_transformer(self) -> TransformerFields:
        """Return the checked fields of `transformer`, with their defaults."""
        return typing.cast(TransformerFields, _known("transformer", self.transformer))

    @property
    def known_ddp(self) -> DdpFields:
        """Return the checked fields of `ddp`, with their defaults."""
        return typing.cast(DdpFields, _known("ddp", self.ddp))

    @property
    def known_optimizer(self) -> OptimizerFields:
        """Return the checked fields of `optimizer`, with their defaults."""
        return typing.cast(OptimizerFields, _known("optimizer", self.optimizer))

    def passed(self, section: str) -> dict[str, Any]:
        """Return the fields of a section that the project does not check. They go to Megatron as they are."""
        names = {f.name for f in dataclasses.fields(CHECKED[section])}
        return {name: value for name, value in getattr(self, section).items() if name not in names}

    @property
    def untested(self) -> list[str]:
        """Return the keys that are set here and that no test of this project trains with."""
        fields = ((section, name) for section in TESTED for name in getattr(self, section))
        return [f"megatron.{section}.{name}" for section, name in fields if name not in TESTED[section]]

    @property
    def tp_comm_overlap(self) -> bool:
        """Return whether products overlap with the communication of sequence parallelism."""
        return self.known_transformer.tp_comm_overlap

    @property
    def fixed_length(self) -> bool:
        """Return whether all microbatches are padded to one length: Transformer Engine's user buffers have one shape."""
        return self.tp_comm_overlap

    @property
    def bf16_layers(self) -> tuple[int, int]:
        """Return the numbers of first and of last layers that stay in bf16 in an FP8 model."""
        known = self.known_transformer
        if not known.first_last_layers_bf16:
            return 0, 0
        return known.num_layers_at_start_in_bf16, known.num_layers_at_end_in_bf16

    def fuses_gradient_accumulation(self, platform: str, offload_activations: bool) -> bool:
        """Return whether the products of weight gradients add into the fp32 sums themselves."""
        asked = self.known_transformer.gradient_accumulation_fusion
        return default_of("megatron.transformer.gradient_accumulation_fusion", platform, asked) and not offload_activations

    def reduces_early(self, platform: str) -> bool:
        """Return whether gradients are reduced during backward."""
        return default_of("megatron.ddp.overlap_grad_reduce", platform, self.known_ddp.overlap_grad_reduce)

    def gathers_late(self, platform: str) -> bool:
        """Return whether an update leaves parameters to be gathered by the next forward pass."""
        wanted = default_of("megatron.ddp.overlap_param_gather", platform, self.known_ddp.overlap_param_gather)
        return wanted and self.reduces_early(platform)

    @property
    def offloaded_share(self) -> float:
        """Return the share of masters and moments that live in host memory."""
        return self.known_optimizer.optimizer_offload_fraction


def untested_fields(megatron: MegatronConfig) -> list[str]:
    """Return the line that names the fields which no test of this project trains with; empty if there are none."""
    return [f"{', '.join(megatron.untested)}: passed to Megatron-Core, not tested here"] if megatron.untested else []


def check_fusion(megatron: MegatronConfig, offload_activations: bool) -> None:
    """Raise ValueError if weight gradients would be fused while activations are offloaded."""
    if offload_activations and megatron.known_transformer.gradient_accumulation_fusion:
        raise ValueError(
            "training.offload_activations=true with megatron.transformer.gradient_accumulation_fusion=true: the hooks that "
            "move what autograd saves hide the parameter from the fused product, and Megatron's DDP finds no gradient; set "
            "gradient_accumulation_fusion to null or false"
        )


def check_bf16_layers(megatron: MegatronConfig, model: ModelConfig) -> None:
    """Raise ValueError if layers would stay in bf16 under a precision that has no such layers."""
    if megatron.known_transformer.first_last_layers_bf16 and not model.fp8:
        raise ValueError(
            f"megatron.transformer.first_last_layers_bf16=true: model.precision={model.precision} has no FP8 layers; set it "
            "to false, or precision to fp8-blockwise"
        )


def check_platform(megatron: MegatronConfig, platform: str) -> None:
    """Raise ValueError if a field needs a GPU and the platform is cpu."""
    if platform == "cuda":
        return
    moments, share = megatron.known_optimizer.small_moments, megatron.offloaded_share
    for key, asked, instead in (
        (f"megatron.optimizer.{moments}", moments, "fp32"),
        (f"megatron.optimizer.optimizer_offload_fraction={share:g}", share > 0, "0"),
        ("megatron.transformer.tp_comm_overlap=true", megatron.tp_comm_overlap, "false"),
    ):
        if asked:
            raise ValueError(f"{key} needs platform=cuda; use {instead}")


def check_overlap(megatron: MegatronConfig, parallel: ParallelConfig, attention: str, platform: str) -> None:
    """Raise ValueError if overlapped communication lacks what it needs: sequence parallelism, or buckets."""
    if megatron.tp_comm_overlap and not parallel.sequence_parallel:
        raise ValueError(
            "megatron.transformer.tp_comm_overlap=true needs parallel.sequence_parallel=true (and parallel.tp > 1); set both, "
            "or neither"
        )
    if megatron.tp_comm_overlap and attention == "sdpa":
        raise ValueError(
            "megatron.transformer.tp_comm_overlap=true is Transformer Engine's, and model.attention=sdpa builds the layers "
            "without it; set model.attention to auto, or tp_comm_overlap to false"
        )
    if megatron.reduces_early(platform):
        return
    ddp = megatron.known_ddp
    off = f"megatron.ddp.overlap_grad_reduce={'null (false on a CPU)' if ddp.overlap_grad_reduce is None else 'false'}"
    for key, asked, instead in (
        (f"megatron.ddp.bucket_size={ddp.bucket_size}", ddp.bucket_size, "null"),
        ("megatron.ddp.overlap_param_gather=true", ddp.overlap_param_gather, "false"),
    ):
        if asked:
            raise ValueError(f"{key} speaks of buckets, and with {off} there is one; set that to true, or this to {instead}")


def check_optimizer_state(megatron: MegatronConfig, checkpoint_every: int | str, resume: bool, colocate: bool) -> None:
    """Raise ValueError if the optimizer's state is not what checkpoints and colocation can handle: fp32, on the device."""
    adam = megatron.known_optimizer
    offload = f"optimizer_offload_fraction={adam.optimizer_offload_fraction:g}" if adam.optimizer_offload_fraction else ""
    other = adam.small_moments or offload
    if other and (checkpoint_every or resume):
        key = f"checkpoint.every={checkpoint_every}" if checkpoint_every else "resume=true"
        default = "the moments to fp32" if adam.small_moments else "optimizer_offload_fraction to 0"
        raise ValueError(
            f"megatron.optimizer.{other} with {key}: checkpoints of such a state are not built; set checkpoint.every to 0 and "
            f"resume to false, or {default}"
        )
    if offload and colocate:
        raise ValueError(
            f"megatron.optimizer.{offload} with rollout.colocate=true: colocation moves all of the optimizer's state to host "
            "memory while the engine works; set optimizer_offload_fraction to 0, or colocate to false"
        )
