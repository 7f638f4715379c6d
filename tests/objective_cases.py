"""The product's answer to a random minibatch, next to the reference's. The minibatches: `tests/reference/minibatches.py`."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.base.types import Denominators, LossOutput, TokenStats
from tepo_megatron.config.objective import PARTS, read_part, variants
from tepo_megatron.losses import Objective
from tepo_megatron.losses.objective import LossInputs
from tepo_megatron.ops.context_parallel import Segments
from tepo_megatron.report.audit.reference import FIELDS, Formula, Outcome
from tests.reference.minibatches import LENGTHS, MARGIN, Batch, draw, expected, fair_cases, gradient

__all__ = [
    "LENGTHS", "MARGIN", "Batch", "compare", "draw", "expected", "fair_cases", "inputs_of", "method_of", "objective_of", "ours",
    "replaced", "section_of",
]  # fmt: skip
TOLERANCES = ((torch.float64, 1e-10), (torch.float32, 1e-5))


def section_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of the reference's method as the product's config has them."""
    section: dict[str, Any] = {}
    for name, value in parts.items():
        part, field = FIELDS.get(name, (name, ""))
        if field and value is not None:
            section.setdefault(part, {})[field] = value
        elif not field:
            section[part] = value
    return section


def replaced(objective: Objective, **parts: Any) -> Objective:
    """Return the objective with parts replaced. Fields that a weighting or correction lacks are left out."""
    section = section_of(parts)
    for part in section.keys() & {part for part, _ in FIELDS.values()}:
        of_row = getattr(objective, part)
        held = {} if of_row is None else dataclasses.asdict(of_row)
        kind = section[part].get("type", held.get("type", ""))
        fields = (held if held.get("type", "") == kind else {}) | section[part]
        known = {f.name for f in dataclasses.fields(variants(PARTS[part])[kind])}
        section[part] = read_part(part, {name: value for name, value in fields.items() if name in known})
    return dataclasses.replace(objective, **section)


def objective_of(**parts: Any) -> Objective:
    """The product's objective with the parts of a method in the reference's words."""
    return replaced(Objective(ratio=parts["ratio"], surrogate=parts.get("surrogate", "clip")), **parts)


def method_of(objective: Objective) -> Formula:
    """Return the objective as a method of the reference."""
    return Formula.of(dataclasses.asdict(objective))


def inputs_of(batch: Batch, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Return the whole minibatch as one microbatch on one rank."""
    lengths = torch.tensor([len(r.old) for r in batch.responses])
    position = torch.tensor([t for n in lengths.tolist() for t in range(n)], dtype=torch.int64)
    segments = Segments(
        torch.repeat_interleave(lengths),
        lengths.clamp(min=1).to(dtype),
        position_R=position,
        chunk_R=torch.zeros_like(position),
    )
    of_prompt = Counter[int]()
    for r in batch.responses:
        of_prompt[r.prompt] += len(r.old)
    counts = (lengths.sum(), len(lengths), len(of_prompt), Formula.max_response_tokens)
    return LossInputs(
        advantage_R=segments.spread(torch.tensor([r.advantage for r in batch.responses], dtype=dtype)),
        old_logprob_R=batch.flat("old").to(dtype),
        old_entropy_R=batch.flat("old_entropy").to(dtype),
        rollout_logprob_R=batch.flat("rollout").to(dtype),
        ref_logprob_R=batch.flat("ref").to(dtype),
        segments=segments,
        group_tokens_R=torch.tensor([of_prompt[r.prompt] for r in batch.responses for _ in r.old], dtype=dtype),
        whole=Denominators(*(torch.tensor(float(x), dtype=dtype) for x in counts)),
    )


def ours(objective: Objective, batch: Batch, dtype: torch.dtype = torch.float64) -> tuple[LossOutput, Tensor, Tensor]:
    """Return the product's output, and its gradients with respect to the log-probs and to the entropies."""
    x = batch.logprob.to(dtype, copy=True).requires_grad_()
    h = batch.entropy.to(dtype, copy=True).requires_grad_()
    inputs = inputs_of(batch, dtype)
    if objective.needs_batch_statistics:
        statistics = objective.batch_statistics(TokenStats(x, h), inputs, batch.keys)
        inputs = dataclasses.replace(inputs, weights=statistics.rows(torch.arange(x.numel())))
    out = objective(TokenStats(x, h), inputs)
    out.loss.backward()
    return out, gradient(x), gradient(h)


def compare(objective: Objective, batch: Batch, theirs: tuple[Outcome, Tensor, Tensor]) -> None:
    """Assert that loss and gradients are those of the reference, in fp64 and in fp32.

    The loss error is relative to the magnitude of the loss (at least to 1, an advantage); the gradient error is in the 2-norm.
    """
    outcome, x_grad, h_grad = theirs
    for dtype, tolerance in TOLERANCES:
        out, grad, entropy_grad = ours(objective, batch, dtype)
        difference = abs(out.loss.item() - outcome.loss.item())
        assert difference <= tolerance * max(1.0, outcome.magnitude), f"{dtype}: loss {out.loss}, expected {outcome.loss}"
        assert torch.isfinite(grad).all() and torch.isfinite(entropy_grad).all()
        assert (grad - x_grad).norm() <= tolerance * x_grad.norm(), f"{dtype}: d logprob"
        assert (entropy_grad - h_grad).norm() <= tolerance * h_grad.norm(), f"{dtype}: d entropy"
