"""The inputs of a loss, apart from the current token statistics."""

from dataclasses import dataclass

from torch import Tensor

from tepo_megatron.base.types import Denominators
from tepo_megatron.losses.weighting import TokenWeights
from tepo_megatron.ops.segments import Segments


@dataclass(frozen=True)
class LossInputs:
    """The inputs for the response rows (_R) of one microbatch."""

    advantage_R: Tensor  # advantage, constant over each sequence
    old_logprob_R: Tensor  # nats, log-probs under the actor's weights at the start of the rollout batch
    old_entropy_R: Tensor  # nats, entropies under the same weights
    rollout_logprob_R: Tensor  # nats, log-probs that the inference engine reported
    segments: Segments  # the sequence of each row, and sums over sequences
    group_tokens_R: Tensor  # response tokens that the minibatch has of the row's prompt, at least 1
    whole: Denominators  # counts of the whole minibatch, the denominators of the loss
    ref_logprob_R: Tensor | None = None  # nats, log-probs under the reference policy. None: the objective uses none.
    weights: TokenWeights | None = None  # weights from `Objective.batch_statistics`. None: the objective has no weighting.
    # Nats; an entropy change below it is rounding noise. Only metrics use it. None: not known.
    noise_floor: float | None = None
