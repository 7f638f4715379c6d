"""The objective, the optimizer, the updates, and how their weights reach the engine."""

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


@config
class SyncConfig:
    """How weights reach the engine, and how far its log-probs may lie from the actor's.

    transport: `shm`, safetensors files, one per owner of a pipeline stage; `group`, broadcasts to all servers' ranks in process
    groups of their own (gloo on CPU, NCCL on GPUs); `ipc`, flat buckets in the owners' own memory, which servers that this run
    starts on the same machine map (CUDA IPC on GPUs, which must reach each other's memory; an unnamed file in memory on CPU).
    quantize: `fp8`, linear layers of the decoder leave their owner in blockwise e4m3, half the bytes of bf16, and the servers
    hold an FP8 model (what `tools/convert.py export --fp8-blockwise` writes; servers of `rollout.server.urls` must be started
    with that). Its log-probs differ more from the actor's: `max_logprob_diff` is then for you to choose.
    folder: where the files of `shm` lie; None: shared memory, which reaches the servers of the ranks' machines, each machine's
    its own. One that others see is on a file system which all ranks and servers share, and of this run alone: what killed runs
    left there is removed.
    join_seconds: with `group`, ranks and servers form the groups at the first delivery and whenever a server comes back, and
    connect in a first broadcast of one byte. A server that lives and does not come in this time, in three attempts, ends the
    run with its name. It is apart from timeout_seconds because the first start of NCCL takes far longer than a round; servers
    answer about their health meanwhile.
    address: of rank 0's machine, at which the groups meet; None: the one on the way to the servers. The port that is open there
    asks for no key.
    delta: only decoder layers (whole ones) and other parameters are sent whose bytes changed since the last push; servers that
    lack it get all. The engine stops sampling before the first of it is written.
    verify_every: then the engine checks each tensor that arrives by its CRC-32, and all servers tell the checksums of what they
    serve: it must be the same on all, and other than before where a tensor is. On CPU vLLM has none of linear layers.
    """

    transport: Literal["shm", "group", "ipc"] = "shm"
    quantize: Literal["none", "fp8"] = "none"
    folder: str | None = None
    bucket_mib: Positive = 512  # of a round, all owners together; shared memory, or the senders, hold two
    address: str | None = None
    delta: bool = False
    timeout_seconds: PositiveFloat = 30.0  # of `group`: for a round to arrive
    # of `group`: for all ranks of trainer and servers to form the groups; None: 30 on cpu, 300 on cuda
    join_seconds: PositiveFloat | None = None
    verify_every: NonNegative = 0  # steps between deliveries that are checked at both ends; 0: none
    # nats: the run stops when the mean |log-prob of the engine - of the actor| of the tokens of a step is above it, each token
    # under the weights that sampled it. Each server is judged by itself too, with some room where it has few tokens
    max_logprob_diff: PositiveFloat = 0.05
    # response tokens of each server and version that a step compares at most where that costs a forward pass of its own: those
    # of older weights (rollout.max_staleness), and with training.old_logprobs: rollout. None: all
    compared_tokens: Positive | None = None

    def join_limit(self, platform: str) -> float:
        """Seconds in which the groups must be formed, of one attempt."""
        return default_of("sync.join_seconds", platform, self.join_seconds)
