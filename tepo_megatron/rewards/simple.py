"""Reward terms other than the right answer: format, length, and a user's own function."""

from collections.abc import Sequence

from tepo_megatron.errors import ConfigError, RewardError
from tepo_megatron.rewards.pool import GradingPool, PoolLimits
from tepo_megatron.rewards.terms import Response, Verdict
from tepo_megatron.utils import user_file


class FormatTerm:
    """Gives 1 if the whole response matches a regular expression, otherwise 0.

    It runs in worker processes, since some expressions take practically forever. Statuses: matched, unmatched, timeout, died.
    """

    def __init__(self, pattern: str, limits: PoolLimits, tokenizer: str = "") -> None:
        """Start the workers in the background."""
        self.pool = GradingPool(limits, ["pattern", pattern], "the pattern of reward.terms", tokenizer)

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        return [Verdict(outcome.value, outcome.status) for outcome in await self.pool.grade((r.written,) for r in responses)]

    async def close(self) -> None:
        await self.pool.close()


class LengthTerm:
    """Gives 1 if min_tokens <= |y| <= max_tokens, |y| / min_tokens for shorter responses, max_tokens / |y| for longer ones.

    |y| counts the tokens that the policy chose. The status is always `measured`.
    """

    pool = None

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens, self._max_tokens = min_tokens, max_tokens

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        return [Verdict(self.value(r.tokens), "measured") for r in responses]

    def value(self, tokens: int) -> float:
        """Return the value of a response of that many tokens, in [0, 1]."""
        if tokens < self._min_tokens:
            return tokens / self._min_tokens
        return min(1.0, self._max_tokens / max(1, tokens))

    async def close(self) -> None:
        """Do nothing: this term holds no resources."""


class CustomTerm:
    """Grades with a user's function `name(prompt: str, response: str, answer: str) -> float` in worker processes.

    Statuses: graded, timeout, died; the last two count as 0. If the function raises, or returns no finite number, grading ends
    with a RewardError that names file and line, since the function is at fault, not the sample.
    """

    def __init__(self, function: str, limits: PoolLimits, tokenizer: str = "") -> None:
        """Start the workers in the background."""
        self._function = function
        self.pool = GradingPool(limits, ["custom", function], f"the function {function} of reward.terms", tokenizer)

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """Return one verdict per response; see `RewardTerm.grade`. Raises RewardError if the function failed."""
        outcomes = await self.pool.grade((r.prompt, r.written, r.answer) for r in responses)
        for outcome in outcomes:
            if outcome.status == "failed":
                raise RewardError(f"the reward function {self._function} failed: {outcome.detail}; fix it")
        return [Verdict(outcome.value, outcome.status) for outcome in outcomes]

    async def close(self) -> None:
        await self.pool.close()


def check_function(spec: str) -> None:
    """Raise ConfigError unless `spec` names a function of (prompt, response, answer). This runs the function's file."""
    found, key = user_file.load(spec, "reward.terms: function"), f"reward.terms: function={spec}"
    if not callable(found.value):
        raise ConfigError(f"{key}: {found.name} is no function; write `def {found.name}(prompt, response, answer) -> float`")
    user_file.check_takes(found, key, 3, "prompt, response and answer")
