"""Overlong shaping and filtering (DAPO, arXiv 2503.14476, Section 3.4): a penalty near the length limit, and a mask at it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tepo_megatron.errors import ConfigError, DataError
from tepo_megatron.types import Rollout


@dataclass(frozen=True)
class OverlongShaping:
    """Adds min(0, -(|y| - (max_tokens - buffer_tokens)) / buffer_tokens * penalty) to the reward of a response of |y| tokens.

    The penalty is 0 up to max_tokens - buffer_tokens tokens and falls linearly to -penalty at max_tokens. A response cut off at
    the limit is treated like one that ends there. |y| counts all tokens after the prompt, those of tools too.

    Raises ConfigError unless 0 < buffer_tokens < max_tokens.

    Attributes:
        max_tokens: `rollout.max_response_tokens`.
        buffer_tokens: Tokens before the limit over which the penalty grows.
        penalty: Penalty at the limit, in units of the reward. DAPO has 1 with verdicts of 1 and -1, which corresponds to 0.5
            with our verdicts of 1 and 0.
    """

    max_tokens: int
    buffer_tokens: int
    penalty: float

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens < self.max_tokens:
            raise ConfigError(
                f"reward.overlong_buffer_tokens={self.buffer_tokens} must be below rollout.max_response_tokens="
                f"{self.max_tokens}, or every response is penalized; lower the first or raise the second"
            )

    def term(self, response_tokens: int) -> float:
        """Return the change of the reward for a response of that many tokens; at most 0."""
        excess = response_tokens - (self.max_tokens - self.buffer_tokens)
        return min(0.0, -excess / self.buffer_tokens * self.penalty)

    def shape(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the graded rollouts in order with a shaped `reward`. The `score` of filters and accuracies is unchanged."""
        return [dataclasses.replace(r, reward=r.reward + self.term(_tokens_since_prompt(r))) for r in rollouts]


def without_truncated(rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """Return the rollouts in order. Those cut off at the length limit have no response token left to train on.

    They still count as sequences in means over sequences. Their tokens are in no other denominator.

    Raises:
        DataError: All of them are cut off.
    """
    if rollouts and all(r.stop_reason == "length" for r in rollouts):
        raise DataError(
            "every response of a step was cut off at rollout.max_response_tokens, and objective.mask_truncated leaves nothing "
            "to learn from; raise the first or set the second to false"
        )
    return tuple(_masked(r) if r.stop_reason == "length" else r for r in rollouts)


def _masked(rollout: Rollout) -> Rollout:
    """Return the rollout with no token that counts as the policy's."""
    mask_L, logprobs_L = torch.zeros_like(rollout.response_mask_L), torch.zeros_like(rollout.rollout_logprobs_L)
    return dataclasses.replace(rollout, response_mask_L=mask_L, rollout_logprobs_L=logprobs_L)


def _tokens_since_prompt(rollout: Rollout) -> int:
    """Count the tokens from the first that the policy chose to the end. Tokens of tools in between count towards max_tokens."""
    return rollout.token_ids_L.numel() - int(rollout.response_mask_L.int().argmax())
