"""The optimizer, the updates, and how their weights reach the engine."""

from __future__ import annotations

from typing import Literal

from tepo_megatron.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, config
from tepo_megatron.config.platform_defaults import default_of


@config
class OptimizerConfig:
    """AdamW in Megatron-Core's distributed optimizer, with fp32 masters and a linear warm-up to a constant learning rate.

    Its decay rates, epsilon, types of moments and offloading are fields of `megatron.optimizer`.
    """

    lr: PositiveFloat = 5e-7  # Learning rate after the warm-up.
    weight_decay: NonNegativeFloat = 0.0  # Decoupled weight decay. One-dimensional parameters have none.
    clip_grad: NonNegativeFloat = 1.0  # Largest 2-norm of the gradient; a larger gradient is scaled down. 0: no clipping.
    warmup_steps: NonNegative = 0  # Training steps (rollout batches) in which the learning rate rises from 0 to `lr`.


@config
class TrainingConfig:
    """The updates that are made from each rollout batch, and how their passes use memory."""

    steps: Positive = 72  # Training steps of the run; each step learns from one rollout batch.
    epochs: Positive = 2  # Passes of the updates over each rollout batch.
    minibatch_prompts: Positive = 16  # Groups (prompts) that one optimizer step learns from.
    # Packed tokens of a microbatch, over all context-parallel ranks. Passes without gradient, which keep no activations, take
    # twice as many (as many, with `megatron.transformer.tp_comm_overlap`).
    max_tokens_per_microbatch: Positive = 16384
    # Source of the old log-probs where a rollout batch has several updates. `actor`: a forward pass; `rollout`: what the engine
    # reported, which has no entropies.
    old_logprobs: Literal["actor", "rollout"] = "actor"
    # MiB of logits to hold at once: the output layer works in chunks of rows, fused with the token statistics, and computes
    # logits beyond the budget again in backward. null: all logits of a microbatch at once.
    logits_budget_mib: NonNegative | None = None
    # Compute a prompt once for all its responses in a microbatch. `auto`: on platform cpu, where it saves enough tokens;
    # `always`: wherever prompts are equal, which needs `model.attention=sdpa` (not measured on GPUs); `never`: not at all.
    share_prompts: Literal["auto", "always", "never"] = "auto"
    # Activations that backward computes again instead of keeping them. `selective`: those inside MLPs and experts; `full`: all
    # but the input of each layer.
    recompute: Literal["none", "selective", "full"] = "none"
    # Keep the activations for backward in host memory, page-locked on GPUs (`actor/activations.py`).
    offload_activations: bool = False

    def shares_prompts(self, platform: str) -> bool:
        """Return whether sequences of a microbatch share prompts, where attention can do that."""
        asked = default_of("training.share_prompts", platform, None if self.share_prompts == "auto" else self.share_prompts)
        return asked != "never"

    def tokens_without_grad(self, fixed_length: bool) -> int:
        """Return the packed tokens of a microbatch in a pass without gradient.

        Args:
            fixed_length: Whether all microbatches have one length (`MegatronConfig.fixed_length`).
        """
        return (1 if fixed_length else 2) * self.max_tokens_per_microbatch


def check_minibatch(training: TrainingConfig, prompts_per_step: int, sequence_tokens: int) -> None:
    """Raise ValueError if minibatches do not fit the rollout batch, or sequences do not fit microbatches.

    Args:
        training: Sizes of minibatches and microbatches.
        prompts_per_step: Groups of a rollout batch.
        sequence_tokens: Most prompt and response tokens of a sequence.
    """
    if training.minibatch_prompts > prompts_per_step:
        raise ValueError(
            f"training.minibatch_prompts={training.minibatch_prompts} exceeds rollout.prompts_per_step={prompts_per_step}; "
            "lower the first or raise the second"
        )
    if sequence_tokens > training.max_tokens_per_microbatch:
        raise ValueError(
            f"training.max_tokens_per_microbatch={training.max_tokens_per_microbatch} cannot hold one sequence of "
            f"{sequence_tokens} tokens (data.max_prompt_tokens + rollout.max_response_tokens, or rollout.max_sequence_tokens "
            "where that is less); raise it to at least that"
        )


def check_recompute(training: TrainingConfig, replay_experts: bool) -> None:
    """Raise ValueError if routers would run again in backward while they replay the engine's experts.

    Args:
        training: Its `recompute`.
        replay_experts: `rollout.replay_experts`.
    """
    if replay_experts and training.recompute != "none":
        raise ValueError(
            f"rollout.replay_experts=true with training.recompute={training.recompute}: routers that compute again would be "
            "given the experts of a later microbatch; set one of them to its default"
        )


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
