"""One policy-optimization method: a choice of ratio, surrogate, KL penalty and aggregation, as a loss.

loss = -sum_R weight * ( surrogate(ratio, A) - beta * M * KL )
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tepo_megatron.advantages import ADVANTAGES
from tepo_megatron.errors import ConfigError
from tepo_megatron.losses.aggregate import AGGREGATES
from tepo_megatron.losses.entropy import advantage_with_entropy
from tepo_megatron.losses.kl import ESTIMATORS, MASKS
from tepo_megatron.losses.ratio import RATIOS
from tepo_megatron.losses.surrogate import SURROGATES, Bounds
from tepo_megatron.ops.segments import Segments
from tepo_megatron.types import Denominators, LossOutput, TokenStats

_TABLES: dict[str, Mapping[str, Any]] = {
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "kl": ESTIMATORS,
    "kl_mask": MASKS,
    "aggregate": AGGREGATES,
    "advantage": ADVANTAGES,
}


@dataclass(frozen=True)
class LossInputs:
    """What a loss needs beside the current statistics, per response row of one microbatch.

    advantage_R: constant over each sequence; old_logprob_R, old_entropy_R: nats, of the actor's weights at the start of the
    rollout batch; segments: which sequence each row belongs to, and how to sum over it; whole: the minibatch's counts.
    """

    advantage_R: Tensor
    old_logprob_R: Tensor
    old_entropy_R: Tensor
    segments: Segments
    whole: Denominators


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A row of the table `OBJECTIVES`; the parts are names in RATIOS, SURROGATES, ESTIMATORS, MASKS, AGGREGATES and
    ADVANTAGES.

    Raises ConfigError for a name that is in no table and for parts that contradict each other.
    """

    ratio: str
    surrogate: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # above 1: bounds what a wrong answer that became likelier can cost
    aggregate: str = "token_mean"
    advantage: str = "std"
    kl: str = "k3"
    kl_mask: str = "none"
    kl_entropy_tolerance: float = 0.0  # nats
    beta: float = 0.0
    entropy_coefficient: float = 0.0  # of the mean entropy in J: above 0 raises it, below 0 lowers it
    advantage_alpha: float = 0.0  # entropy inside the advantage
    advantage_kappa: float = 2.0

    def __post_init__(self) -> None:
        for part, table in _TABLES.items():
            name = getattr(self, part)
            if name not in table:
                raise ConfigError(f"objective.{part}={name!r} is unknown; use one of {', '.join(table)}")
        if self.beta and self.kl_mask == "none":
            raise ConfigError(
                f"objective.beta={self.beta} has no effect under objective.kl_mask=none; set beta to 0 or choose a mask"
            )
        if not 0 <= self.clip_low <= 1:
            raise ConfigError(f"objective.clip_low={self.clip_low} must lie in [0, 1]: at 1 the ratio is never clipped below")
        if self.dual_clip is not None and (self.dual_clip <= 1 or self.surrogate != "clip"):
            raise ConfigError(
                f"objective.dual_clip={self.dual_clip} must be above 1 and goes with objective.surrogate=clip, not "
                f"{self.surrogate}"
            )
        if self.ratio == "none" and self.surrogate != "reinforce":
            raise ConfigError(
                f"objective.ratio=none leaves objective.surrogate={self.surrogate} without gradient; use surrogate=reinforce"
            )
        if self.advantage_kappa <= 0:
            raise ConfigError(f"objective.advantage_kappa={self.advantage_kappa} must be positive")

    def replace(self, **parts: Any) -> Objective:
        """The same method with other parts; None keeps the row's own."""
        return dataclasses.replace(self, **{k: v for k, v in parts.items() if v is not None})

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The keys of `LossOutput.metrics`, known on ranks that compute no loss too."""
        return ("loss/total", "loss/kl", "loss/clip_fraction", "tepo/kl_mask_share")

    @property
    def has_constant_factors(self) -> bool:
        """Whether all that multiplies the ratio is the same on every token of a sequence.

        The group's advantage, the denominators and the loss mask are; an advantage with entropy in it is not.
        """
        return self.advantage_alpha == 0

    def __call__(self, stats: TokenStats, inputs: LossInputs) -> LossOutput:
        """This rank's part of the loss of a minibatch.

        Gradients: through stats.logprob_R, and through stats.entropy_R for the entropy term alone: dH of the mask and the
        entropy inside an advantage are numbers, not functions. Collectives: those of the ratio.
        """
        segments, advantage_R = inputs.segments, inputs.advantage_R
        if self.advantage_alpha:
            advantage_R = advantage_with_entropy(advantage_R, stats.entropy_R, self.advantage_alpha, self.advantage_kappa)
        log_ratio_R = stats.logprob_R - inputs.old_logprob_R
        ratio_R = RATIOS[self.ratio](log_ratio_R, segments, self.has_constant_factors)
        bounds = Bounds(self.clip_low, self.clip_high, self.dual_clip)
        value_R, clipped_R = SURROGATES[self.surrogate](ratio_R, stats.logprob_R, advantage_R, bounds)

        entropy_change_R = stats.entropy_R.detach() - inputs.old_entropy_R
        mask_R = MASKS[self.kl_mask](advantage_R, entropy_change_R, self.kl_entropy_tolerance)
        penalty_R = mask_R * ESTIMATORS[self.kl](log_ratio_R)

        weight_R = AGGREGATES[self.aggregate](segments, inputs.whole)
        loss = -(weight_R * (value_R - self.beta * penalty_R)).sum()
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * (weight_R * stats.entropy_R).sum()
        return LossOutput(loss, self._metrics(loss, weight_R * penalty_R, clipped_R, mask_R, inputs), ratio_R.detach())

    @staticmethod
    def _metrics(
        loss: Tensor, weighted_penalty_R: Tensor, clipped_R: Tensor, mask_R: Tensor, inputs: LossInputs
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """(numerator, denominator) of this rank; the first two denominators add up to 1 over the minibatch."""
        tokens = loss.new_tensor(float(mask_R.numel()))
        share = tokens / inputs.whole.tokens
        return {
            "loss/total": (loss.detach(), share),
            "loss/kl": (weighted_penalty_R.detach().sum(), share),
            "loss/clip_fraction": (clipped_R.sum(), tokens),
            "tepo/kl_mask_share": (mask_R.sum(), tokens),
        }
