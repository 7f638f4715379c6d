"""Loss and gradients of a minibatch, computed by a loss function and by the reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.report.audit.reference import Formula
from tests.conformance.cases import Case
from tests.conformance.parts import Part, parts_of
from tests.reference.minibatches import Batch, expected, gradient

Loss = Callable[[Part], Tensor]


@dataclass(frozen=True)
class Answer:
    """Loss and gradients of a minibatch, fp64."""

    loss: float
    logprob_N: Tensor
    entropy_N: Tensor

    @property
    def gradient(self) -> Tensor:
        """Both gradients, concatenated."""
        return torch.cat((self.logprob_N, self.entropy_N))

    @property
    def finite(self) -> bool:
        """True if the loss and both gradients are finite."""
        return math.isfinite(self.loss) and bool(torch.isfinite(self.gradient).all())


def answer(loss: Loss, batch: Batch, case: Case) -> Answer:
    """Return the sum of the answers for the parts of a case's layout."""
    x = batch.logprob.to(case.dtype, copy=True).requires_grad_()
    h = batch.entropy.to(case.dtype, copy=True).requires_grad_()
    total = 0.0
    for part in parts_of(batch, x, h, case.layout, case.padding):
        value = loss(part)
        if value.requires_grad:
            value.backward()
        total += float(value.detach())
    return Answer(total, gradient(x).double(), gradient(h).double())


def right_answer(method: Formula, batch: Batch) -> tuple[Answer, float]:
    """Return the reference's answer, and the sum of the absolute values that its loss adds up."""
    outcome, x_grad, h_grad = expected(method, batch)
    return Answer(float(outcome.loss.detach()), x_grad, h_grad), outcome.magnitude


def errors(got: Answer, right: Answer, magnitude: float) -> tuple[float, float]:
    """Return the relative errors of the loss and of the gradients; nan counts as infinite.

    Args:
        magnitude: Sum of the absolute values that the loss adds up; the loss error is relative to it, at least to 1.
    """
    norm = float(right.gradient.norm())
    of_loss = abs(got.loss - right.loss) / max(1.0, magnitude)
    of_gradient = float((got.gradient - right.gradient).norm()) / (norm or 1.0)
    return (of_loss if of_loss == of_loss else math.inf), (of_gradient if of_gradient == of_gradient else math.inf)
