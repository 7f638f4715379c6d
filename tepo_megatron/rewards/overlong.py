"""Overlong shaping: a penalty that grows as a response nears the length limit (DAPO, arXiv 2503.14476, Eq. 13)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.types import Rollout


@dataclass(frozen=True)
class OverlongShaping:
    """Adds min(0, -(|y| - (max_tokens - buffer_tokens)) / buffer_tokens * penalty) to the reward of a response of |y| tokens.

    The penalty is 0 up to max_tokens - buffer_tokens tokens and falls linearly to -penalty at max_tokens. A response cut off at
    the limit is treated like one that ends there. |y| counts all tokens after the prompt, those of tools too. Raises
    ConfigError unless 0 < buffer_tokens < max_tokens. `penalty`: penalty at the limit, in units of the reward. DAPO has 1 with
    verdicts of 1 and -1, which corresponds to 0.5 with our verdicts of 1 and 0.
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


def _tokens_since_prompt(rollout: Rollout) -> int:
    """Count the tokens from the first that the policy chose to the end. Tokens of tools in between count towards max_tokens."""
    return rollout.token_ids_L.numel() - int(rollout.response_mask_L.int().argmax())
