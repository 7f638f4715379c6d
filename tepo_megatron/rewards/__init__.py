"""Rewards: what grades a rollout. `_BUILDERS` names every kind; a config chooses one by `reward.type`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self

from tepo_megatron.config import RewardConfig
from tepo_megatron.rewards.math import MathReward
from tepo_megatron.types import Rollout

Decode = Callable[[Sequence[int]], str]


class Reward(Protocol):
    """Grades rollouts; a context manager, since it may hold processes."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Exactly one graded rollout for each given, in order: `reward`, `score` and `status` set.

        A bad answer is a status, never an error; RewardError if the grader itself cannot work.
        """
        ...

    def close(self) -> None:
        """Give back what it holds. A second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


def build_reward(cfg: RewardConfig, decode: Decode) -> Reward:
    """The reward that `cfg.type` names. decode: response token ids -> text, special tokens skipped.

    Returns at once: workers start in the background and are waited for by the first `score`.
    """
    return _BUILDERS[cfg.type](cfg, decode)


def _math(cfg: RewardConfig, decode: Decode) -> MathReward:
    return MathReward(
        decode,
        workers=cfg.workers,
        soft_seconds=cfg.soft_seconds,
        hard_seconds=cfg.hard_seconds,
        memory_mib=cfg.memory_mib,
        max_answer_chars=cfg.max_answer_chars,
    )


_BUILDERS: dict[str, Callable[[RewardConfig, Decode], Reward]] = {"math": _math}
