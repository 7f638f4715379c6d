"""Rewards, which grade rollouts. `_TERMS` lists every kind of term; a config adds terms up in `reward.terms`."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from tepo_megatron.config import RewardConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.grading.answers import gold_fault
from tepo_megatron.rewards.code import CodeTerm
from tepo_megatron.rewards.judge import JudgeTerm
from tepo_megatron.rewards.math import MathTerm
from tepo_megatron.rewards.pool import GradingPool, limits_of
from tepo_megatron.rewards.simple import CustomTerm, FormatTerm, LengthTerm, check_function
from tepo_megatron.rewards.terms import Decode, RewardTerm, WeightedReward
from tepo_megatron.types import Rollout
from tepo_megatron.utils.loop import LoopFuture

__all__ = ["Decode", "Reward", "build_reward", "check_reward", "gold_fault"]


class Reward(Protocol):
    """Grades rollouts, many groups at once. It is a context manager, since it may hold processes."""

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all gradings so far."""

    def submit(self, group: Sequence[Rollout]) -> "LoopFuture[list[Rollout]]":
        """Start to grade a group next to those submitted before, and return its future result at once; see `score`."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return one graded rollout for each given rollout, in order, with `reward`, `score` and `status` set.

        A bad answer gives a status, never an error. Raises RewardError if the grader itself cannot work.
        """

    def close(self) -> None:
        """Release processes and connections. A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


def build_reward(cfg: RewardConfig, decode: Decode, tokenizer: str = "") -> WeightedReward:
    """Return the reward that `cfg` describes, at once: workers start in the background, and the first grading waits for them.

    Args:
        tokenizer: File with which the workers decode (`data.tokenizer.decoder_file`). Empty: this process decodes.
    """
    terms: list[tuple[float, RewardTerm]] = []
    try:
        for entry in cfg.terms:
            terms.append((entry.weight, _TERMS[entry.type](cfg, entry, tokenizer)))
    except BaseException:
        WeightedReward(terms, decode).close()
        raise
    return WeightedReward(terms, decode, in_workers=bool(tokenizer))


def check_reward(cfg: RewardConfig) -> None:
    """Raise ConfigError for what can be refused before anything is started: a custom function, a sandbox or an API key."""
    from tepo_megatron.grading import sandbox
    from tepo_megatron.rewards.remote import key_from

    for entry in cfg.terms:
        if entry.type == "custom":
            check_function(entry.function)
        if entry.type == "code":
            try:
                sandbox.check()
            except OSError as e:
                raise ConfigError(f"reward.terms: type=code: {e}") from None
        if entry.type == "http" or entry.type == "judge":
            key_from(entry.key_variable)


def _judge(cfg: RewardConfig, entry: Any, tokenizer: str) -> RewardTerm:
    return JudgeTerm(entry, limits_of(cfg), tokenizer)


def _http(cfg: RewardConfig, entry: Any, tokenizer: str) -> RewardTerm:
    from tepo_megatron.rewards import remote  # aiohttp takes a while

    decoders = "the tokenizer of the model"
    return remote.HttpTerm(
        entry.url,
        timeout_seconds=entry.timeout_seconds,
        attempts=remote.ATTEMPTS,
        backoff_seconds=remote.BACKOFF_SECONDS,
        key_variable=entry.key_variable,
        concurrency=entry.concurrency,
        pool=GradingPool(limits_of(cfg), ["texts"], decoders, tokenizer, remote.TEXT_BYTES) if tokenizer else None,
    )


_TERMS: dict[str, Callable[[RewardConfig, Any, str], RewardTerm]] = {
    "math": lambda cfg, entry, tokenizer: MathTerm("boxed", limits_of(cfg), tokenizer),
    "answer_line": lambda cfg, entry, tokenizer: MathTerm("answer_line", limits_of(cfg), tokenizer),
    "format": lambda cfg, entry, tokenizer: FormatTerm(entry.pattern, limits_of(cfg), tokenizer),
    "length": lambda cfg, entry, tokenizer: LengthTerm(entry.min_tokens, entry.max_tokens),
    "code": lambda cfg, entry, tokenizer: CodeTerm(entry, cfg.workers, tokenizer),
    "custom": lambda cfg, entry, tokenizer: CustomTerm(entry.function, limits_of(cfg), tokenizer),
    "http": _http,
    "judge": _judge,
}
