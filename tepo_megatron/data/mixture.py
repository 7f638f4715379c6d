"""Load all prompts that a run reads: the training sets of the mixture and the held-out set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tepo_megatron.base.types import Prompt
from tepo_megatron.config import DataConfig, RewardConfig
from tepo_megatron.data.prompts import load_prompts
from tepo_megatron.rewards.gold_check import unreadable_golds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Limit since the first answers of the grader, which starts slowly: the result is only reported; then the rest is untried
GOLDS_SECONDS = 30.0


@dataclass(frozen=True)
class Data:
    """The prompts of a run.

    Attributes:
        train: (prompts, sampling weight) of each training set.
        eval: Held-out problems; empty without `data.eval`.
        log_lines: Lines for the log about what was read and dropped.
    """

    train: list[tuple[list[Prompt], float]]
    eval: list[Prompt]
    log_lines: list[str]

    @property
    def count(self) -> int:
        """Number of prompts to train on, over all sets."""
        return sum(len(prompts) for prompts, _ in self.train)


def load_data(cfg: DataConfig, reward: RewardConfig, tokenizer: "PreTrainedTokenizerBase") -> Data:
    """Read all sets that `cfg` names. A prompt that several training sets have is kept in the first of them only.

    Prompts of `data.eval` that are also in `data.train` are kept in both and reported in a warning line.

    Raises:
        DataError: A set cannot be read or used.
        ConfigError: Settings do not fit the prompts or the chat template.
    """

    def try_golds(golds: Sequence[str]) -> tuple[dict[str, str], int]:
        """Try gold answers on the grader, without a time limit where the result decides what is kept."""
        return unreadable_golds(golds, reward, GOLDS_SECONDS if cfg.check_answers == "tell" else math.inf)

    log_lines: list[str] = []
    train: list[tuple[list[Prompt], float]] = []
    seen: dict[bytes, tuple[str, str]] = {}
    for number, source in enumerate(cfg.sets):
        loaded = load_prompts(source, cfg, tokenizer, try_golds, number=number, earlier=seen)
        seen |= loaded.seen
        train.append((loaded.prompts, source.weight))
        log_lines += [str(loaded.report), loaded.report.reading(), *loaded.report.details()]
    if not cfg.held_out:
        return Data(train, [], log_lines)
    held_out = load_prompts(cfg.held_out[0], cfg, tokenizer, try_golds)
    log_lines += [str(held_out.report), held_out.report.reading(), *held_out.report.details()]
    if both := len(held_out.seen.keys() & seen.keys()):
        log_lines.append(f"warning: {both} of the {len(held_out.seen)} prompts of data.eval are in data.train too")
    return Data(train, held_out.prompts, log_lines)
