"""The model, its precision, and the mesh that it lies on."""

from typing import Literal

from tepo_megatron.base.limits import START_SECONDS
from tepo_megatron.config.fields import Positive, PositiveFloat, config

Precision = Literal["fp32", "bf16", "fp8-current", "fp8-blockwise"]


@config
class ModelConfig:
    """The model, its precision, and the implementation of its layers."""

    path: str  # Hugging Face directory of the initial policy: config.json, safetensors files, tokenizer.
    # Type of weights and activations; the optimizer keeps fp32 copies. `fp8-*`: parameters in bf16, products of layers in FP8
    # (docs/precision.md).
    precision: Precision = "bf16"
    # Implementation of attention and layers. `auto`: Transformer Engine where it is installed (platform cuda), else PyTorch's
    # scaled dot-product attention.
    attention: Literal["auto", "te", "sdpa"] = "auto"

    def __post_init__(self) -> None:
        if self.fp8 and self.attention == "sdpa":
            raise ValueError(
                f"attention=sdpa builds the layers without Transformer Engine, and precision={self.precision} is its; set "
                "attention to auto, or precision to bf16"
            )

    @property
    def fp8(self) -> bool:
        """Return whether layers multiply in FP8."""
        return self.precision.startswith("fp8")

    @property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """Return the type of the parameters, and of the weights that engines and exports get."""
        return "fp32" if self.precision == "fp32" else "bf16"


@config
class ParallelConfig:
    """Sizes of the mesh axes. Their product tp x pp x cp x dp is the number of ranks."""

    tp: Positive = 1  # Tensor-parallel ranks: each layer's weights are divided over them.
    pp: Positive = 1  # Pipeline stages: the layers are divided over them.
    vpp: Positive = 1  # Model chunks per pipeline stage (interleaved schedule).
    cp: Positive = 1  # Context-parallel ranks: each packed sequence is divided over them.
    ep: Positive = 1  # Expert-parallel ranks, inside dp x cp: the experts are divided over them.
    dp: Positive = 1  # Data-parallel ranks: each minibatch is divided over them.
    sequence_parallel: bool = False  # Divide norms and residuals over tp, too, along the sequence.
    # Seconds in which the ranks must have joined, and the rollout service must have started. Collectives of the start may wait
    # as long for the rank that loads its weights last.
    # Limit since the start of ranks and service: imports take 10 minutes on a cold file system, 14B weights 10 more; then `has
    # not started`, or torch's time-out of a group; a start
    start_seconds: PositiveFloat = START_SECONDS
    # Seconds that a collective of training may wait. A rank that is in one place for 0.9 of them ends the run, with its name.
    # Limit since a rank last moved in training: a microbatch of 32k tokens takes a minute, the first one compiles; then `has
    # been in one place for`
    timeout_seconds: PositiveFloat = 1800.0
    # Seconds without a heartbeat after which a rank counts as frozen and ends the run with its name.
    # Limit since the last heartbeat of a rank, or answer of the service: a library of 1 GB from a cold file system holds the
    # interpreter for a minute; then `has not been heard of for` or `gave no answer`
    heartbeat_timeout: PositiveFloat = 300.0

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel=true needs tp > 1; set it to false or raise tp")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1; set vpp to 1 or raise pp")
        if (self.dp * self.cp) % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp*cp={self.dp * self.cp}")

    @property
    def restart_seconds(self) -> float:
        """Return the seconds in which ranks that another machine restarts are back: they only import their modules again."""
        return self.start_seconds / 3

    @property
    def group_seconds(self) -> float:
        """Return the time limit of collectives. In training, the hang watchdog ends the run after `stuck_seconds` already."""
        return max(self.start_seconds, self.timeout_seconds)

    @property
    def stuck_seconds(self) -> float:
        """Return the seconds in one place after which a rank is reported as stuck, before a collective gives up."""
        return 0.9 * self.timeout_seconds

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the whole job."""
        return self.tp * self.pp * self.cp * self.dp


def check_attention(model: ModelConfig, parallel: ParallelConfig, share_prompts: str, platform: str) -> None:
    """Raise ValueError if the attention cannot do what the config asks of it."""
    if share_prompts == "always" and model.attention == "te":
        raise ValueError(
            "training.share_prompts=always with model.attention=te, whose packed attention cannot give several responses the "
            "keys of one prompt; set model.attention to sdpa, or share_prompts to auto or never"
        )
    if model.precision == "fp32" and model.attention == "te" and parallel.cp > 1:
        raise ValueError(
            f"model.precision=fp32 with model.attention=te and parallel.cp={parallel.cp}: Transformer Engine has no attention "
            "in fp32 under context parallelism; set model.attention to auto or sdpa, or model.precision to bf16, or "
            "parallel.cp to 1"
        )
    if platform == "cuda":
        return
    for key, asked, instead in (
        ("model.attention=te", model.attention == "te", "auto or sdpa"),
        (f"model.precision={model.precision}", model.fp8, "bf16 or fp32"),
    ):
        if asked:
            raise ValueError(f"{key} needs platform=cuda; use {instead}")
