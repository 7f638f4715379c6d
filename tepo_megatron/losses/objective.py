"""One policy-optimization method: a choice of ratio, surrogate, KL penalty and aggregation, as a loss.

loss = -sum_R weight * ( surrogate(ratio, A) - beta * M * KL )
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tepo_megatron.errors import ConfigError
from tepo_megatron.losses.aggregate import AGGREGATES
from tepo_megatron.losses.kl import ESTIMATORS, MASKS
from tepo_megatron.losses.ratio import RATIOS
from tepo_megatron.losses.surrogate import SURROGATES
from tepo_megatron.ops.segments import Segments
from tepo_megatron.types import Denominators, LossOutput, TokenStats

_TABLES: dict[str, Mapping[str, Any]] = {
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "kl": ESTIMATORS,
    "kl_mask": MASKS,
    "aggregate": AGGREGATES,
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
    """A row of the table `OBJECTIVES`; the parts are names in RATIOS, SURROGATES, ESTIMATORS, MASKS, AGGREGATES.

    Raises ConfigError for a name that is in no table and for parts that contradict each other.
    """

    ratio: str
    surrogate: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregate: str = "token_mean"
    kl: str = "k3"
    kl_mask: str = "none"
    kl_entropy_tolerance: float = 0.0  # nats
    beta: float = 0.0

    def __post_init__(self) -> None:
        for part, table in _TABLES.items():
            name = getattr(self, part)
            if name not in table:
                raise ConfigError(f"objective.{part}={name!r} is unknown; use one of {', '.join(table)}")
        if self.beta and self.kl_mask == "none":
            raise ConfigError(
                f"objective.beta={self.beta} has no effect under objective.kl_mask=none; set beta to 0 or choose a mask"
            )
        if not 0 <= self.clip_low < 1:
            raise ConfigError(f"objective.clip_low={self.clip_low} must lie in [0, 1): the ratio is never below 0")

    def replace(self, **parts: Any) -> Objective:
        """The same method with other parts; None keeps the row's own."""
        return dataclasses.replace(self, **{k: v for k, v in parts.items() if v is not None})

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The keys of `LossOutput.metrics`, known on ranks that compute no loss too."""
        return ("loss/total", "loss/kl", "loss/clip_fraction", "tepo/kl_mask_share")

    def __call__(self, stats: TokenStats, inputs: LossInputs) -> LossOutput:
        """This rank's part of the loss of a minibatch.

        Gradients: through stats.logprob_R; the entropy only decides the mask (dH is a number, not a function).
        Collectives: those of the ratio.
        """
        segments, advantage_R = inputs.segments, inputs.advantage_R
        log_ratio_R = stats.logprob_R - inputs.old_logprob_R
        # the advantage, the denominators and the loss mask are constant over each sequence
        ratio_R = RATIOS[self.ratio](log_ratio_R, segments, True)
        value_R, clipped_R = SURROGATES[self.surrogate](ratio_R, advantage_R, self.clip_low, self.clip_high)

        entropy_change_R = stats.entropy_R.detach() - inputs.old_entropy_R
        mask_R = MASKS[self.kl_mask](advantage_R, entropy_change_R, self.kl_entropy_tolerance)
        penalty_R = mask_R * ESTIMATORS[self.kl](log_ratio_R)

        weight_R = AGGREGATES[self.aggregate](segments, inputs.whole)
        loss = -(weight_R * (value_R - self.beta * penalty_R)).sum()
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
