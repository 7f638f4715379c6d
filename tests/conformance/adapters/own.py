"""An `Objective` of this project as a loss function of the kit."""

import torch
from torch import Tensor

from tepo_megatron.base.types import Denominators, TokenStats
from tepo_megatron.losses import Objective
from tepo_megatron.losses.objective import LossInputs
from tepo_megatron.losses.weighting import TokenWeights
from tepo_megatron.ops.context_parallel import Segments
from tepo_megatron.report.audit.reference import Formula
from tests.conformance.answers import Loss
from tests.conformance.parts import Part


def loss_of(objective: Objective) -> Loss:
    def loss(part: Part) -> Tensor:
        weights = None
        if objective.needs_batch_statistics and part.tokens:
            whole = part.whole or part
            stats = TokenStats(whole.logprob.detach()[whole.mask], whole.entropy.detach()[whole.mask])
            statistics = objective.batch_statistics(stats, _inputs(whole, None), whole.key[whole.mask])
            place = torch.zeros(whole.mask.shape, dtype=torch.int64)
            place[whole.mask] = torch.arange(int(whole.mask.sum()))
            weights = statistics.rows(place[part.rows][:, : part.mask.size(1)][part.mask])
        elif objective.needs_batch_statistics:
            weights = TokenWeights(part.logprob.detach()[part.mask], part.logprob.detach()[part.mask])
        stats = TokenStats(part.logprob[part.mask], part.entropy[part.mask])
        return objective(stats, _inputs(part, weights)).loss

    return loss


def _inputs(part: Part, weights: TokenWeights | None) -> LossInputs:
    """The padded part as flat response rows."""
    mask, dtype = part.mask, part.logprob.dtype
    sequence_R, position_R = mask.nonzero().unbind(1)
    return LossInputs(
        advantage_R=part.advantage[sequence_R],
        old_logprob_R=part.old_logprob[mask],
        old_entropy_R=part.old_entropy[mask],
        rollout_logprob_R=part.rollout_logprob[mask],
        segments=Segments(sequence_R, part.length.clamp(min=1).to(dtype), None, position_R, torch.zeros_like(position_R)),
        group_tokens_R=torch.ones(0, dtype=dtype),  # the kit knows no prompts
        whole=Denominators(
            tokens=torch.tensor(max(1, part.tokens), dtype=dtype),
            sequences=torch.tensor(part.sequences, dtype=dtype),
            prompts=torch.tensor(1, dtype=dtype),
            max_response_tokens=torch.tensor(Formula.max_response_tokens, dtype=dtype),
        ),
        ref_logprob_R=part.ref_logprob[mask],
        weights=weights,
    )
