"""Rewards, which grade rollouts. `_TERMS` lists every kind of term; a config adds terms up in `reward.terms`."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from tepo_megatron.config import RewardConfig
from tepo_megatron.rewards.boxed import last_answer, last_boxed
from tepo_megatron.rewards.gold import gold_fault
from tepo_megatron.rewards.math import STATUSES, MathTerm
from tepo_megatron.rewards.pool import limits_of
from tepo_megatron.rewards.simple import CustomTerm, FormatTerm, LengthTerm, check_function
from tepo_megatron.rewards.terms import Decode, RewardTerm, WeightedReward
from tepo_megatron.types import Rollout

__all__ = ["STATUSES", "Decode", "Reward", "build_reward", "check_reward", "gold_fault"]


class Reward(Protocol):
    """Grades rollouts. It is a context manager, since it may hold processes."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return one graded rollout for each given rollout, in order, with `reward`, `score` and `status` set.

        A bad answer gives a status, never an error. Raises RewardError if the grader itself cannot work.
        """

    def close(self) -> None:
        """Release processes and connections. A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


def build_reward(cfg: RewardConfig, decode: Decode) -> WeightedReward:
    """Return the reward that `cfg` describes, at once: workers start in the background, and the first `score` waits for them.

    Args:
        cfg: The reward configuration.
        decode: Turns token ids into text, leaving out special tokens.
    """
    with contextlib.ExitStack() as stack:
        terms = []
        for entry in cfg.terms:
            term = _TERMS[entry.type](cfg, entry)
            stack.callback(term.close)
            terms.append((entry.weight, term))
        stack.pop_all()
    return WeightedReward(terms, decode)


def check_reward(cfg: RewardConfig) -> None:
    """Raise ConfigError for what can be refused before anything is started: a custom function or an API key that is missing."""
    from tepo_megatron.rewards.remote import key_from

    for entry in cfg.terms:
        if entry.type == "custom":
            check_function(entry.function)
        if entry.type == "http":
            key_from(entry.key_variable)


def _http(cfg: RewardConfig, entry: Any) -> RewardTerm:
    from tepo_megatron.rewards import remote  # aiohttp takes a while, and every rank imports this package

    return remote.HttpTerm(
        entry.url,
        timeout_seconds=entry.timeout_seconds,
        attempts=remote.ATTEMPTS,
        backoff_seconds=remote.BACKOFF_SECONDS,
        key_variable=entry.key_variable,
    )


_TERMS: dict[str, Callable[[RewardConfig, Any], RewardTerm]] = {
    "math": lambda cfg, entry: MathTerm(last_boxed, limits_of(cfg)),
    "answer_line": lambda cfg, entry: MathTerm(last_answer, limits_of(cfg)),
    "format": lambda cfg, entry: FormatTerm(entry.pattern, limits_of(cfg)),
    "length": lambda cfg, entry: LengthTerm(entry.min_tokens, entry.max_tokens),
    "custom": lambda cfg, entry: CustomTerm(entry.function, limits_of(cfg)),
    "http": _http,
}
