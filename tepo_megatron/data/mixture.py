"""All that a run reads: the sets that are mixed, and what it is evaluated on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tepo_megatron.config import DataConfig, DataSet, RewardConfig
from tepo_megatron.data.prompts import load_prompts
from tepo_megatron.rewards.gold_check import unreadable_golds
from tepo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GOLDS_SECONDS = 30.0  # for trying the answers of one set on the grader, where that decides nothing


@dataclass(frozen=True)
class Data:
    """train: the sets with their weights; eval: the held-out problems, none without `data.eval`; told: lines for the log."""

    train: list[tuple[list[Prompt], float]]
    eval: list[Prompt]
    told: list[str]

    @property
    def count(self) -> int:
        """Prompts to train on."""
        return sum(len(prompts) for prompts, _ in self.train)


def load_data(cfg: DataConfig, reward: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Read all that `cfg` names. A prompt of several sets is one of the first of them. Raises DataError and ConfigError."""

    def try_golds(golds: Sequence[str]) -> tuple[dict[str, str], int]:
        return unreadable_golds(golds, reward, GOLDS_SECONDS if cfg.check_answers == "tell" else math.inf)

    told: list[str] = []
    train: list[tuple[list[Prompt], float]] = []
    seen: dict[bytes, tuple[str, str]] = {}
    for number, source in enumerate(cfg.sets):
        loaded = load_prompts(source, cfg, tokenizer, try_golds, number=number, earlier=seen)
        seen |= loaded.seen
        train.append((loaded.prompts, source.weight))
        told += [str(loaded.report), *loaded.report.details()]
    if cfg.eval is None:
        return Data(train, [], told)
    source = DataSet(path=cfg.eval, prompt_key=cfg.prompt_key, answer_key=cfg.answer_key)
    held_out = load_prompts(source, cfg, tokenizer, try_golds)
    told += [str(held_out.report), *held_out.report.details()]
    if both := len(held_out.seen.keys() & seen.keys()):
        told.append(f"warning: {both} of the {len(held_out.seen)} prompts of data.eval are in data.train too")
    return Data(train, held_out.prompts, told)
