"""Environments: an interface of `reset` and `step` for games and simulations, played through `rollout.function`.

class Guess:
    async def reset(self, prompt: Prompt) -> str: ...           # text after the prompt; may be empty
    async def step(self, action: str) -> EnvironmentStep: ...        # what the model wrote -> what it reads next
    async def close(self) -> None: ...                          # optional

game = play(Guess)                                              # rollout.function: path/to/file.py:game

Where the prompts of the data are chats, observations are turns of the user; where they are strings, text that follows.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from tepo_megatron.base.types import Prompt
from tepo_megatron.rollout.conversation import Conversation, OutOfTokens


@dataclass(frozen=True)
class EnvironmentStep:
    """The answer of an environment to an action."""

    observation: str
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode. A new object is made for each sample.

    It may also have `async def close(self) -> None`, which ends the episode, also after an error or a cancellation; after a
    cancellation it has a second.
    """

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
                conversation.append_user(first)
            while True:
                turn = await conversation.generate(stop_token_ids=stops)
                result = await environment.step(turn.text)
                reward += result.reward
                if result.done:
                    return reward
                if result.observation or conversation.prompt.messages:  # in a chat an empty turn of the user follows, too
                    conversation.append_user(result.observation)
        except OutOfTokens:
            return reward  # the episode was cut off; what it has earned counts
        finally:
            if (close := getattr(environment, "close", None)) is not None:
                await close()

    return play_episode
