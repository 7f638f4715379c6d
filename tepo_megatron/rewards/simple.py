"""Terms besides the right answer: form, length, a function of the user's own."""

from __future__ import annotations

from collections.abc import Sequence

from tepo_megatron import user_file
from tepo_megatron.errors import ConfigError, RewardError
from tepo_megatron.rewards.pool import GradingPool, PoolLimits
from tepo_megatron.rewards.terms import Response, Verdict


class FormatTerm:
    """1 where the whole response matches a regular expression, else 0. In worker processes: some expressions take for ever.

    Statuses: matched, unmatched, timeout, died.
    """

    def __init__(self, pattern: str, limits: PoolLimits) -> None:
        self.pool = GradingPool(limits, ["pattern", pattern], "the pattern of reward.terms")

    def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """See `Term.grade`."""
        return [Verdict(outcome.value, outcome.status) for outcome in self.pool.grade([(r.text,) for r in responses])]

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


class LengthTerm:
    """1 where min_tokens <= |y| <= max_tokens; |y| / min_tokens for shorter responses, max_tokens / |y| for longer ones.

    Status: measured.
    """

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens, self._max_tokens = min_tokens, max_tokens

    def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """See `Term.grade`."""
        return [Verdict(self.value(r.tokens), "measured") for r in responses]

    def value(self, tokens: int) -> float:
        """Of a response of so many tokens: in [0, 1]."""
        if tokens < self._min_tokens:
            return tokens / self._min_tokens
        return min(1.0, self._max_tokens / max(1, tokens))

    def close(self) -> None:
        """It holds nothing."""


class CustomTerm:
    """What a function of the user's own finds: `name(prompt: str, response: str, answer: str) -> float`, in worker processes.

    Statuses: graded, timeout, died; the latter two count as 0. Where it raises, or returns no finite number, grading ends with
    a RewardError that names file and line: a fault of the function is not the sample's.
    """

    def __init__(self, function: str, limits: PoolLimits) -> None:
        self._function = function
        self.pool = GradingPool(limits, ["custom", function], f"the function {function} of reward.terms")

    def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """See `Term.grade`."""
        outcomes = self.pool.grade([(r.prompt, r.text, r.answer) for r in responses])
        for outcome in outcomes:
            if outcome.status == "failed":
                raise RewardError(f"the reward function {self._function} failed: {outcome.detail}; mend it")
        return [Verdict(outcome.value, outcome.status) for outcome in outcomes]

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


def check_function(spec: str) -> None:
    """Raise ConfigError unless `spec` names a function of (prompt, response, answer). Its file is run."""
    found, key = user_file.load(spec, "reward.terms: function"), f"reward.terms: function={spec}"
    if not callable(found.value):
        raise ConfigError(f"{key}: {found.name} is no function; write `def {found.name}(prompt, response, answer) -> float`")
    user_file.check_takes(found, key, 3, "prompt, response and answer")
