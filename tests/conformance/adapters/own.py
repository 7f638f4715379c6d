"""The rows of this project's table."""

import math
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.base.types import Denominators, TokenStats
from tepo_megatron.losses import OBJECTIVES, Objective
from tepo_megatron.losses.inputs import LossInputs
from tepo_megatron.losses.weighting import TokenWeights
from tepo_megatron.ops.segments import Segments
from tepo_megatron.report.audit.reference import Formula
from tests.conformance.answers import Loss
from tests.conformance.check import Subject
from tests.conformance.parts import Part
from tests.objective_cases import replaced
from tests.reference.methods import METHODS

# coefficients and shares that are large enough for every part to have a visible effect
_LARGER = {"beta": 0.5, "entropy_coefficient": 0.1, "advantage_alpha": 0.4, "cov_share": 0.2, "cov_low": 0.3}
NEEDS = "this repository's environment: `make .venv/.ready`"


def loss_of(objective: Objective) -> Loss:
    def loss(part: Part) -> Tensor:
        weights = None
        if objective.needs_batch_statistics and part.tokens:
            whole = part.whole or part
            stats = TokenStats(whole.logprob.detach()[whole.mask], whole.entropy.detach()[whole.mask])
            found = objective.batch_statistics(stats, _inputs(whole, None), whole.key[whole.mask])
            place = torch.zeros(whole.mask.shape, dtype=torch.int64)
            place[whole.mask] = torch.arange(int(whole.mask.sum()))
            weights = found.rows(place[part.rows][:, : part.mask.size(1)][part.mask])
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
            *(torch.tensor(x, dtype=dtype) for x in (max(1, part.tokens), part.sequences, 1, Formula.max_response_tokens))
        ),
        ref_logprob_R=part.ref_logprob[mask],
        weights=weights,
    )


def _subject(name: str, **more: Any) -> Subject:
    """more: replaced parts, by their names in the reference."""
    method = METHODS[name] | more
    parts = {k: math.copysign(v, method[k]) for k, v in _LARGER.items() if method.get(k)} | more
    reaches_over_sequences = method["ratio"] in ("sequence", "prefix") or method.get("correction") == "geometric_mask"
    return Subject(
        ", ".join([name, *(f"{k}={v}" for k, v in more.items())]),
        loss_of(replaced(OBJECTIVES[name], **parts)),
        Formula(**(method | parts)),
        splits_sequences=not reaches_over_sequences,
    )


def subjects() -> list[Subject]:
    """Return every row, with larger coefficients, and the corrections."""
    return [
        *(_subject(name) for name in OBJECTIVES),
        _subject("grpo", correction="tis", correction_high=2.0),
        _subject("gspo", correction="geometric_mask", correction_low=0.8, correction_high=1.3),
        _subject("dapo", correction="icepop", correction_low=0.5, correction_high=5.0, ref_beta=0.1),
    ]
