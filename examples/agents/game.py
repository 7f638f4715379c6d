"""A text game for the demo's model: make a chain of sums, one operation in each turn, and leave no mistake in it.

    prompt    9+5-7?
    turn      9+5=      the game writes 14
    turn      -7=       the game writes 7
    turn      .\\boxed{7}

A turn earns nothing; the end earns 1 for the right result, and 0 for a wrong one. A model that guesses at once seldom wins.
"""

import re

from tepo_megatron.base.types import Prompt
from tepo_megatron.rollout.environment import EnvironmentStep, play

MOST_TURNS = 5
OPERATION = re.compile(r"(\d+)([+-])(\d+)$")
BOXED = re.compile(r"\\boxed\{([^}]*)\}")


class SumGame:
    """One episode of the game."""

    def __init__(self) -> None:
        self._answer, self._written, self._turns = "", "", 0

    async def reset(self, prompt: Prompt) -> str:
        """Begin with the prompt's problem."""
        self._answer = prompt.answer
        return ""

    async def step(self, action: str) -> EnvironmentStep:
        """Compute the operation that the model wrote, or judge its result."""
        self._turns += 1
        if not action.endswith("=") or self._turns >= MOST_TURNS:
            return EnvironmentStep("", float(BOXED.findall(action)[-1:] == [self._answer]), done=True)
        found = result(self._written + action[:-1])
        self._written += action + found
        return EnvironmentStep(found)


def result(text: str) -> str:
    """Return the result of the operation at the end of a text; "?" if there is none."""
    found = OPERATION.search(text)
    if found is None:
        return "?"
    left, sign, right = found.groups()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))


game = play(SumGame, stop="=")
