"""The objective, the optimizer and the updates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tepo_megatron.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, config
from tepo_megatron.config.platform_defaults import default_of


@config
class ObjectiveConfig:
    """A row of `losses.OBJECTIVES`, and replacements for its parts (None: as the row has it)."""

    name: str = "tepo"  # of the row
    ratio: str | None = None
    surrogate: str | None = None
    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None
    dual_clip: PositiveFloat | None = None
    aggregate: str | None = None
    advantage: str | None = None
    kl: str | None = None
    kl_mask: str | None = None
    kl_entropy_tolerance: NonNegativeFloat | None = None  # nats: |dH| up to this counts as no change
    beta: NonNegativeFloat | None = None
    ref_kl: str | None = None
    ref_beta: NonNegativeFloat | None = None  # above 0: a penalty towards `model.reference`
    ref_kl_in: str | None = None
    entropy_coefficient: Annotated[float, Field(allow_inf_nan=False)] | None = None
    advantage_alpha: NonNegativeFloat | None = None
    advantage_kappa: PositiveFloat | None = None
    weighting: str | None = None
    cov_share: PositiveFloat | None = None
    cov_low: NonNegativeFloat | None = None
    cov_high: PositiveFloat | None = None
    cov_beta: PositiveFloat | None = None
    steer_lambda_min: PositiveFloat | None = None
    correction: str | None = None  # of the rollout/train mismatch
    correction_low: NonNegativeFloat | None = None
    correction_high: PositiveFloat | None = None
    dynamic_sampling: bool | None = None
    overlong_shaping: bool | None = None


@config
class OptimizerConfig:
    """AdamW as Megatron-Core's distributed optimizer runs it, with fp32 masters and linear warm-up to a constant rate.

    lr: that rate; beta1, beta2: decay of the two moments; eps: beside the root of the second; weight_decay: decoupled.
    moments: what both are kept in, if not in fp32; offload: the share of masters and moments that live in host memory, where
    PyTorch's AdamW steps them. Both need Transformer Engine.
    """

    lr: PositiveFloat = 5e-7
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 1.0  # 2-norm; 0: never clipped
    warmup_steps: NonNegative = 0  # in training steps (rollout batches), not in updates
    moments: Literal["fp32", "bf16", "fp8"] = "fp32"
    offload: Annotated[float, Field(ge=0, le=1)] = 0.0

    def __post_init__(self) -> None:
        if self.offload and self.moments != "fp32":
            raise ValueError(
                f"moments={self.moments} and offload={self.offload:g}: the optimizer of the host knows fp32 only; set moments "
                "to fp32, or offload to 0"
            )


@config
class TrainingConfig:
    """steps: rollout batches; epochs: how often each is seen; minibatch_prompts: groups that one optimizer step learns from."""

    steps: Positive = 72
    epochs: Positive = 2
    minibatch_prompts: Positive = 16
    max_tokens_per_microbatch: Positive = 16384  # packed tokens of one forward pass, over all context-parallel ranks
    # the same of passes without gradient, which keep no activations (old, reference and noise); None: twice that
    max_tokens_without_grad: Positive | None = None
    fixed_length: bool = False  # every microbatch is padded to max_tokens_per_microbatch, in passes without gradient too
    # of several updates on a rollout batch. actor: a pass of its own; rollout: what the engine reported, which knows no entropy
    old_logprobs: Literal["actor", "rollout"] = "actor"
    # None: all logits of a microbatch at once. Else the output layer works in chunks of rows, fused with the token statistics,
    # and logits beyond so many MiB are computed again in backward
    logits_budget_mib: NonNegative | None = None
    # responses to one prompt that are in the same microbatch compute it once, in every pass. auto: on platform cpu, where that
    # saves enough tokens; always: wherever prompts are equal, which needs model.attention=sdpa (on GPUs: not measured)
    share_prompts: Literal["auto", "always", "never"] = "auto"
    # activations that backward computes again instead of keeping them; selective: those inside of the MLPs and experts; full:
    # all but the input of each layer
    recompute: Literal["none", "selective", "full"] = "none"
    offload_activations: bool = False  # what backward needs waits for it in host memory (`actor/activations.py`)
    # each product of a weight's gradient adds straight into the fp32 sum over microbatches. null: on GPUs, without
    # offload_activations
    fuse_gradient_accumulation: bool | None = None

    def __post_init__(self) -> None:
        if self.offload_activations and self.fuse_gradient_accumulation:
            raise ValueError(
                "offload_activations=true with fuse_gradient_accumulation=true: the hooks that move what autograd saves hide "
                "the parameter from the fused product, and Megatron's DDP finds no gradient; set fuse_gradient_accumulation "
                "to null or false"
            )
        if self.fixed_length and self.max_tokens_without_grad not in (None, self.max_tokens_per_microbatch):
            raise ValueError(
                f"fixed_length=true pads all to max_tokens_per_microbatch={self.max_tokens_per_microbatch}, and "
                f"max_tokens_without_grad={self.max_tokens_without_grad} is another length; set that to null"
            )

    def shares_prompts(self, platform: str) -> bool:
        """Whether sequences of a microbatch share prompts, where attention can do that."""
        asked = default_of("training.share_prompts", platform, None if self.share_prompts == "auto" else self.share_prompts)
        return asked != "never"

    def fuses_gradient_accumulation(self, platform: str) -> bool:
        """Return whether the products of weight gradients add into the fp32 sums themselves."""
        fuses = default_of("training.fuse_gradient_accumulation", platform, self.fuse_gradient_accumulation)
        return fuses and not self.offload_activations

    @property
    def tokens_without_grad(self) -> int:
        """`max_tokens_without_grad`, or its default: that of one shape where all have one."""
        return self.max_tokens_without_grad or (1 if self.fixed_length else 2) * self.max_tokens_per_microbatch
