"""Rewards, which grade rollouts. `_TERMS` lists every kind of term; a config adds terms up in `reward.terms`."""

from collections.abc import Callable
from typing import Any

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import RewardConfig
from tepo_megatron.rewards.grading.answers import gold_fault
from tepo_megatron.rewards.local import CodeTerm, CustomTerm, FormatTerm, LengthTerm, MathTerm, ReasoningGymTerm, check_function
from tepo_megatron.rewards.pool import limits_of
from tepo_megatron.rewards.remote import HttpTerm, JudgeTerm, key_from
from tepo_megatron.rewards.terms import Decode, RewardTerm, WeightedReward

__all__ = ["Decode", "WeightedReward", "build_reward", "check_reward", "gold_fault"]


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
    from tepo_megatron.rewards.grading import sandbox

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


_TERMS: dict[str, Callable[[RewardConfig, Any, str], RewardTerm]] = {
    "math": lambda cfg, entry, tokenizer: MathTerm("boxed", limits_of(cfg), tokenizer),
    "answer_line": lambda cfg, entry, tokenizer: MathTerm("answer_line", limits_of(cfg), tokenizer),
    "format": lambda cfg, entry, tokenizer: FormatTerm(entry.pattern, limits_of(cfg), tokenizer),
    "length": lambda cfg, entry, tokenizer: LengthTerm(entry.min_tokens, entry.max_tokens),
    "code": lambda cfg, entry, tokenizer: CodeTerm(entry, cfg.workers, tokenizer),
    "custom": lambda cfg, entry, tokenizer: CustomTerm(entry.function, limits_of(cfg), tokenizer),
    "reasoning_gym": lambda cfg, entry, tokenizer: ReasoningGymTerm(entry, limits_of(cfg), tokenizer),
    "http": lambda cfg, entry, tokenizer: HttpTerm(entry, limits_of(cfg), tokenizer),
    "judge": lambda cfg, entry, tokenizer: JudgeTerm(entry, limits_of(cfg), tokenizer),
}
