"""The inputs of a loss, apart from the current token statistics."""

from dataclasses import dataclass

from torch import Tensor

from tepo_megatron.losses.weighting import TokenWeights
from tepo_megatron.ops.segments import Segments
from tepo_megatron.types import Denominators


@dataclass(frozen=True)
class LossInputs:
    """The inputs for the response rows (_R) of one microbatch.

    Attributes:
        advantage_R: Advantage, constant over each sequence.
        old_logprob_R: Nats, log-probs under the actor's weights at the start of the rollout batch.
        old_entropy_R: Nats, entropies under the same weights.
        rollout_logprob_R: Nats, log-probs that the inference engine reported.
        segments: The sequence of each row, and sums over sequences.
        group_tokens_R: Response tokens that the minibatch has of the row's prompt, at least 1.
        whole: Counts of the whole minibatch, the denominators of the loss.
        ref_logprob_R: Nats, log-probs under the reference policy. None: the objective uses none.
        weights: Weights from `Objective.batch_statistics`. None: the objective has no weighting.
        noise_floor: Nats; an entropy change below it is rounding noise. Only metrics use it. None: not known.
    """

    advantage_R: Tensor
    old_logprob_R: Tensor
    old_entropy_R: Tensor
    rollout_logprob_R: Tensor
    segments: Segments
    group_tokens_R: Tensor
    whole: Denominators
    ref_logprob_R: Tensor | None = None
    weights: TokenWeights | None = None
    noise_floor: float | None = None
