"""Sections `training`, `optimizer` and `sft`: the updates of a run, and those of supervised fine-tuning.

`tepo sft` fine-tunes with the same model, layout and checkpoints.
"""

from typing import Literal

from tepo_megatron.config.data import check_source
from tepo_megatron.config.fields import NonNegative, Positive, PositiveFloat, config, default_of


@config
class OptimizerConfig:
    """AdamW in Megatron-Core's distributed optimizer, with fp32 masters and a linear warm-up to a constant learning rate.

    Its decay rates, epsilon, types of moments and offloading are fields of `megatron.optimizer`.
    """

    lr: PositiveFloat = 5e-7  # Learning rate after the warm-up.
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
    # Train each minibatch as soon as its groups are there, while the others of the rollout batch are still being sampled; each
    # rank keeps a copy of the weights at the batch's start in host memory, for the old log-probs. off: wait for the whole
    # batch. prompt: the minibatches and their order are those of off, and so are the updates. arrival: each minibatch takes the
    # groups that are there first; which they were is logged. Later epochs have the whole batch.
    stream: Literal["off", "prompt", "arrival"] = "off"
    # MiB of logits to hold at once: the output layer works in chunks of rows, fused with the token statistics, and computes
    # logits beyond the budget again in backward. null: all logits of a microbatch at once.
    logits_budget_mib: NonNegative | None = None
    # Compute a prompt once for all its responses in a microbatch. `auto`: on platform cpu, where it saves enough tokens;
    # `always`: wherever prompts are equal, which needs `model.attention=sdpa` (not measured on GPUs); `never`: not at all.
    share_prompts: Literal["auto", "always", "never"] = "auto"
    # Activations that backward computes again instead of keeping them. `selective`: those inside MLPs and experts; `full`: all
    # but the input of each layer.
    recompute: Literal["none", "selective", "full"] = "none"
    # Keep the activations for backward in host memory, page-locked on GPUs (`actor/offload.py`).
    offload_activations: bool = False

    @property
    def streams(self) -> bool:
        """Return whether updates begin before the rollout batch is complete."""
        return self.stream != "off"

    def shares_prompts(self, platform: str) -> bool:
        """Return whether sequences of a microbatch share prompts, where attention can do that."""
        asked = default_of("training.share_prompts", platform, None if self.share_prompts == "auto" else self.share_prompts)
        return asked != "never"

    def tokens_without_grad(self, fixed_length: bool) -> int:
        """Return the packed tokens of a microbatch in a pass without gradient."""
        return (1 if fixed_length else 2) * self.max_tokens_per_microbatch


def check_sequence(training: TrainingConfig, sequence_tokens: int) -> None:
    """Raise ValueError if a sequence does not fit a microbatch."""
    if sequence_tokens > training.max_tokens_per_microbatch:
        raise ValueError(
            f"training.max_tokens_per_microbatch={training.max_tokens_per_microbatch} cannot hold one sequence of "
            f"{sequence_tokens} tokens (data.max_prompt_tokens + rollout.max_response_tokens); raise it to at least that"
        )


def check_recompute(training: TrainingConfig, replay_experts: bool) -> None:
    """Raise ValueError if routers would run again in backward while they replay the engine's experts."""
    if replay_experts and training.recompute != "none":
        raise ValueError(
            f"rollout.replay_experts=true with training.recompute={training.recompute}: routers that compute again would be "
            "given the experts of a later microbatch; set one of them to its default"
        )


@config
class SftConfig:
    """Supervised fine-tuning (`tepo sft`). `tepo train` ignores this section."""

    # Conversations to train on: a file or dataset, with a slice, as in data.train. Rows hold a chat (messages, conversations)
    # or a prompt and a response. Required by `tepo sft`.
    data: str | None = None
    # Held-out conversations, in the same form, on which the loss is measured. null: none.
    eval: str | None = None
    # Key of the prompt, or of the chat, in a row; a dot leads into an object. null: the key is detected.
    prompt_key: str | None = None
    # Key of the response in a row. null: it is detected; rows with a chat have none.
    response_key: str | None = None
    # Turns whose tokens are learned: all turns of the assistant, or the last one alone.
    train_on: Literal["assistant", "last"] = "assistant"
    # Maximum number of tokens of a conversation. Longer ones are dropped and counted.
    max_tokens: Positive = 4096
    # Number of conversations per update.
    batch_sequences: Positive = 64
    # Passes over the data.
    epochs: Positive = 1
    # Number of updates after which training ends, if it comes before the end of the last pass. null: no limit.
    steps: Positive | None = None
    # Number of updates between measurements of the held-out loss; 0: only at the start and at the end.
    eval_every: NonNegative = 0
    # Held-out loss, in nats per token, at which training ends. Needs `eval` and `eval_every`. null: no such end.
    stop_at_loss: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if self.stop_at_loss is not None and not (self.eval is not None and self.eval_every):
            raise ValueError("sft.stop_at_loss needs held-out conversations (sft.eval) and sft.eval_every above 0")
        for key, source in (("data", self.data), ("eval", self.eval)):
            if source is not None:
                check_source(key, source)
