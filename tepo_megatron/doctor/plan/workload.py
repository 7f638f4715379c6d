"""Assume the lengths of a step's sequences, which no config determines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from tepo_megatron.config import DYNAMIC_SAMPLING_ROUNDS, Config, ObjectiveConfig, RolloutConfig
from tepo_megatron.doctor.plan.gpus import ASSUMED

_SIGMA = 0.7  # standard deviation of the logarithm of a response's length
_PROMPT_SHARE, _RESPONSE_SHARE = 1 / 8, 1 / 4  # share of the maximum that the config allows


@dataclass(frozen=True)
class Workload:
    """Lengths of a step's prompts and responses."""

    prompt: int
    response: int
    longest: int  # maximum tokens of a response; truncated responses have this length
    dropped: float = 0.0  # share of the groups that are entirely right or entirely wrong, which are not learned from

    @classmethod
    def of(cls, cfg: Config, prompt: int | None = None, response: int | None = None, dropped: float | None = None) -> Workload:
        """Return the workload of a config.

        Args:
            prompt: Tokens of every prompt. None: an eighth of data.max_prompt_tokens.
            response: Mean tokens of a response. None: a quarter of the longest response.
            dropped: Share of dropped groups, if `rollout.filter_uniform_groups` drops any. None: `Assumptions.uniform_groups`.
        """
        longest = min(cfg.sequence_tokens - (prompt or 0), cfg.rollout.max_response_tokens)
        prompt = prompt or max(1, round(cfg.data.max_prompt_tokens * _PROMPT_SHARE))
        response = response or max(1, round(longest * _RESPONSE_SHARE))
        dropped = ASSUMED.uniform_groups if dropped is None else dropped
        share = dropped if cfg.rollout.filter_uniform_groups else 0.0
        return cls(min(prompt, cfg.data.max_prompt_tokens), min(response, longest), longest, share)

    def rounds(self, rollout: RolloutConfig, objective: ObjectiveConfig) -> tuple[list[int], int]:
        """Return the number of prompts in each sampling round of a step, and the number of groups that are learned from.

        Each round samples for the missing groups, and `rollout.max_generation_rounds` limits the rounds.
        """
        wanted = rollout.prompts_per_step
        asked: list[int] = []
        kept = 0
        while kept < wanted and len(asked) < max_generation_rounds(rollout, objective):
            asked.append(math.ceil((wanted - kept) * rollout.oversample))
            kept = min(wanted, kept + max(1, round(asked[-1] * (1 - self.dropped))))
        return asked, kept

    def responses(self, count: int) -> tuple[int, ...]:
        """Return the lengths of `count` responses: quantiles of a lognormal distribution truncated at `longest`."""
        return _quantiles(self.response, self.longest, count)

    def sequences(self, count: int) -> list[int]:
        """Return the lengths of `count` sequences with their prompts, in an order that mixes long and short ones."""
        lengths = self.responses(count)
        step = next(n for n in range(max(1, int(count * 0.618)), count + 1) if math.gcd(n, count) == 1)
        return [self.prompt + lengths[i * step % count] for i in range(count)]


def max_generation_rounds(rollout: RolloutConfig, objective: ObjectiveConfig) -> int:
    """Return `rollout.max_generation_rounds`, resolved like in `method.resolve`, which needs torch."""
    if rollout.max_generation_rounds is not None:
        return rollout.max_generation_rounds
    return DYNAMIC_SAMPLING_ROUNDS if objective.name == "dapo" else 1


@lru_cache(maxsize=64)
def _quantiles(mean: int, longest: int, count: int) -> tuple[int, ...]:
    normal = NormalDist()
    shape = [math.exp(_SIGMA * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    low, high = 0.0, longest / min(shape)
    for _ in range(50):  # bisection for the scale at which the truncated lengths have this mean
        scale = (low + high) / 2
        if sum(min(longest, scale * x) for x in shape) / count < mean:
            low = scale
        else:
            high = scale
    return tuple(max(1, round(min(longest, high * x))) for x in shape)
