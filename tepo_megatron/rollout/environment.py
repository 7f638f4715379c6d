"""Environments: an interface of `reset` and `step` for games and simulations, played through `rollout.function`.

class Guess:
    async def reset(self, prompt: Prompt) -> str: ...           # text after the prompt; may be empty
    async def step(self, action: str) -> EnvironmentStep: ...        # what the model wrote -> what it reads next

game = play(Guess)                                              # rollout.function: path/to/file.py:game
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from tepo_megatron.rollout.conversation import Conversation, OutOfTokens
from tepo_megatron.types import Prompt


@dataclass(frozen=True)
class EnvironmentStep:
    """The answer of an environment to an action."""

    observation: str
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode. A new object is made for each sample."""

    async def reset(self, prompt: Prompt) -> str:
        """Begin the episode of a prompt, and return the text that the model reads after the prompt."""

    async def step(self, action: str) -> EnvironmentStep:
        """Return the answer to what the model wrote in its turn."""


def play(make: Callable[[], Environment], stop: str | None = None) -> Callable[[Conversation], Awaitable[float]]:
    """Return the generation function of an environment. Its reward is the sum of the steps' rewards.

    `stop`: text whose first token ends a turn, as its last token. None: the tokens that end a response.
    """

    async def play_episode(conversation: Conversation) -> float:
        environment, reward = make(), 0.0
        stops = () if stop is None else tuple(conversation.encode(stop))[:1]
        try:
            if first := await environment.reset(conversation.prompt):
                conversation.append(first)
            while True:
                turn = await conversation.generate(stop_token_ids=stops)
                result = await environment.step(turn.text)
                reward += result.reward
                if result.done:
                    return reward
                if result.observation:
                    conversation.append(result.observation)
        except OutOfTokens:
            return reward  # the episode was cut off; what it has earned counts

    return play_episode
