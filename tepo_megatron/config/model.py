"""The model, its precision, and the mesh that it lies on."""

from __future__ import annotations

from typing import Literal

from tepo_megatron.config.fields import NonNegative, Positive, PositiveFloat, config
from tepo_megatron.config.platform_defaults import default_of

Precision = Literal["fp32", "bf16", "fp8-delayed", "fp8-current", "fp8-blockwise"]


@config
class ModelConfig:
    """path: a Hugging Face directory (config.json, safetensors, tokenizer).

    precision: of weights and activations; the optimizer keeps fp32 copies.
    """

    path: str
    reference: str | None = None  # the reference policy of objective.ref_beta, of the same architecture; None: as `path`
    # a row of `actor/precision.py`: fp8-* keep parameters in bf16 and multiply in FP8 by Transformer Engine (docs/precision.md)
    precision: Precision = "bf16"
    bf16_end_layers: NonNegative = 0  # of fp8-current and fp8-blockwise: so many first and so many last layers stay in bf16
    # `auto` takes Transformer Engine where it is installed (platform cuda), else PyTorch's SDPA
    attention: Literal["auto", "te", "sdpa"] = "auto"

    def __post_init__(self) -> None:
        if self.fp8 and self.attention == "sdpa":
            raise ValueError(
                f"attention=sdpa builds the layers without Transformer Engine, and precision={self.precision} is its; set "
                "attention to auto, or precision to bf16"
            )
        if self.bf16_end_layers and self.precision not in ("fp8-current", "fp8-blockwise"):
            why = (
                "has no FP8 layers" if not self.fp8 else "keeps a history of scales for all layers alike (Megatron refuses it)"
            )
            raise ValueError(
                f"bf16_end_layers={self.bf16_end_layers}: precision={self.precision} {why}; set it to 0, or precision to "
                "fp8-current or fp8-blockwise"
            )

    @property
    def fp8(self) -> bool:
        """Whether layers multiply in FP8."""
        return self.precision.startswith("fp8")

    @property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """Of the parameters, and of the weights that engines and exports get."""
        return "fp32" if self.precision == "fp32" else "bf16"


@config
class ParallelConfig:
    """Sizes of the mesh axes; their product tp*pp*cp*dp is the number of ranks.

    tp: tensor parallel; pp: pipeline stages; cp: context parallel; ep: of the experts, inside dp x cp; dp: data parallel.
    sequence_parallel: norms and residuals, too, are cut over tp, along the sequence.
    """

    tp: Positive = 1
    pp: Positive = 1
    vpp: Positive = 1  # model chunks per pipeline stage
    cp: Positive = 1
    ep: Positive = 1
    dp: Positive = 1
    sequence_parallel: bool = False
    # gradients are reduced over dp x cp bucket by bucket while backward goes on; None: on GPUs
    overlap_grad_reduce: bool | None = None
    # parameters are gathered over dp x cp bucket by bucket when the next forward pass comes to them; None: on GPUs
    overlap_param_gather: bool | None = None
    # of sequence parallelism: Transformer Engine communicates parts of a product's input or output while it multiplies others
    tp_comm_overlap: bool = False
    bucket_parameters: Positive | None = None  # of a bucket; None: Megatron's 40 million, or a million for each of dp x cp
    timeout_seconds: PositiveFloat = 600.0  # a collective of training that waits longer fails
    # Seconds without a heartbeat after which a rank counts as frozen and the run ends with its name (`hang_watchdog.py`).
    heartbeat_timeout: PositiveFloat = 60.0

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel=true needs tp > 1; set it to false or raise tp")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1; set vpp to 1 or raise pp")
        if self.tp_comm_overlap and not self.sequence_parallel:
            raise ValueError("tp_comm_overlap=true needs sequence_parallel=true (and tp > 1); set both, or neither")
        if self.overlap_param_gather and self.overlap_grad_reduce is False:
            raise ValueError(
                "overlap_param_gather=true needs overlap_grad_reduce=true, which makes the buckets that it gathers; set that "
                "to true, or this to false"
            )
        if (self.dp * self.cp) % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp*cp={self.dp * self.cp}")

    def reduces_early(self, platform: str) -> bool:
        """Whether gradients are reduced during backward."""
        return default_of("parallel.overlap_grad_reduce", platform, self.overlap_grad_reduce)

    def gathers_late(self, platform: str) -> bool:
        """Whether an update leaves parameters to be gathered by the next forward pass."""
        wanted = default_of("parallel.overlap_param_gather", platform, self.overlap_param_gather)
        return wanted and self.reduces_early(platform)

    @property
    def stuck_seconds(self) -> float:
        """A rank in one place for so long is reported as stuck, before a collective gives up, which says less."""
        return 0.9 * self.timeout_seconds

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.tp * self.pp * self.cp * self.dp
