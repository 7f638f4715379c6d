"""The product's answer to a random minibatch, next to the reference's. The minibatches: `tests/reference/minibatches.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.losses import Objective
from tepo_megatron.losses.inputs import LossInputs
from tepo_megatron.ops.segments import Segments
from tepo_megatron.types import Denominators, LossOutput, TokenStats
from tests.reference import objectives as reference
from tests.reference.methods import CORRECTION_BOUNDS
from tests.reference.minibatches import LENGTHS, MARGIN, Batch, draw, expected, fair_cases, gradient
from tests.reference.parts import Method

__all__ = ["LENGTHS", "MARGIN", "Batch", "compare", "draw", "expected", "fair_cases", "inputs_of", "method_of", "ours"]
TOLERANCES = ((torch.float64, 1e-10), (torch.float32, 1e-5))


def method_of(objective: Objective) -> Method:
    """Return the objective as a method of the reference."""
    parts: dict[str, Any] = dataclasses.asdict(objective)
    low, high = CORRECTION_BOUNDS[objective.correction]
    parts["correction_low"] = low if objective.correction_low is None else objective.correction_low
    parts["correction_high"] = high if objective.correction_high is None else objective.correction_high
    return Method(**parts)


def inputs_of(batch: Batch, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Return the whole minibatch as one microbatch on one rank.

    Args:
        batch: The minibatch.
        dtype: Dtype of all tensors.
    """
    lengths = torch.tensor([len(r.old) for r in batch.responses])
    position = torch.tensor([t for n in lengths.tolist() for t in range(n)], dtype=torch.int64)
    segments = Segments(
        torch.repeat_interleave(lengths),
        lengths.clamp(min=1).to(dtype),
        position_R=position,
        chunk_R=torch.zeros_like(position),
    )
    return LossInputs(
        advantage_R=segments.spread(torch.tensor([r.advantage for r in batch.responses], dtype=dtype)),
        old_logprob_R=batch.flat("old").to(dtype),
        old_entropy_R=batch.flat("old_entropy").to(dtype),
        rollout_logprob_R=batch.flat("rollout").to(dtype),
        ref_logprob_R=batch.flat("ref").to(dtype),
        segments=segments,
        whole=Denominators(lengths.sum().to(dtype), torch.tensor(float(len(lengths)), dtype=dtype)),
    )


def ours(objective: Objective, batch: Batch, dtype: torch.dtype = torch.float64) -> tuple[LossOutput, Tensor, Tensor]:
    """Return the product's output, and its gradients with respect to the log-probs and to the entropies.

    Args:
        objective: Objective to evaluate.
        batch: The minibatch.
        dtype: Dtype of the computation.
    """
    x = batch.logprob.to(dtype, copy=True).requires_grad_()
    h = batch.entropy.to(dtype, copy=True).requires_grad_()
    inputs = inputs_of(batch, dtype)
    if objective.needs_batch_statistics:
        statistics = objective.batch_statistics(TokenStats(x, h), inputs, batch.keys)
        inputs = dataclasses.replace(inputs, weights=statistics.rows(torch.arange(x.numel())))
    out = objective(TokenStats(x, h), inputs)
    out.loss.backward()
    return out, gradient(x), gradient(h)


def compare(objective: Objective, batch: Batch, theirs: tuple[reference.Outcome, Tensor, Tensor]) -> None:
    """Assert that loss and gradients are those of the reference, in fp64 and in fp32.

    The loss error is relative to the magnitude of the loss (at least to 1, an advantage); the gradient error is in the 2-norm.

    Args:
        objective: Objective of the product.
        batch: The minibatch.
        theirs: Answer of the reference.
    """
    outcome, x_grad, h_grad = theirs
    for dtype, tolerance in TOLERANCES:
        out, grad, entropy_grad = ours(objective, batch, dtype)
        difference = abs(out.loss.item() - outcome.loss.item())
        assert difference <= tolerance * max(1.0, outcome.magnitude), f"{dtype}: loss {out.loss}, expected {outcome.loss}"
        assert torch.isfinite(grad).all() and torch.isfinite(entropy_grad).all()
        assert (grad - x_grad).norm() <= tolerance * x_grad.norm(), f"{dtype}: d logprob"
        assert (entropy_grad - h_grad).norm() <= tolerance * h_grad.norm(), f"{dtype}: d entropy"
