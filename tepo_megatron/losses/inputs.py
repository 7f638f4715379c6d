"""What a loss is given beside the current statistics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tepo_megatron.losses.weighting import TokenWeights
from tepo_megatron.ops.segments import Segments
from tepo_megatron.types import Denominators


@dataclass(frozen=True)
class LossInputs:
    """Per response row (_R) of one microbatch.

    advantage_R: constant over each sequence; old_logprob_R, old_entropy_R: nats, of the actor's weights at the start of the
    rollout batch; rollout_logprob_R: the engine's; segments: which sequence each row belongs to, and how to sum over it;
    whole: the minibatch's counts; ref_logprob_R: the reference policy's; weights: of the weighting, from
    `Objective.batch_statistics`; noise_floor: nats, |dH| below it is rounding (for the metrics alone).
    """

    advantage_R: Tensor
    old_logprob_R: Tensor
    old_entropy_R: Tensor
    rollout_logprob_R: Tensor
    segments: Segments
    whole: Denominators
    ref_logprob_R: Tensor | None = None
    weights: TokenWeights | None = None
    noise_floor: float | None = None
