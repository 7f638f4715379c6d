"""Loss and gradients of a minibatch: those of a loss function, and those of the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.conformance.cases import Case
from tests.conformance.parts import Part, parts_of
from tests.reference.minibatches import Batch, expected, gradient
from tests.reference.parts import Method

Loss = Callable[[Part], Tensor]


@dataclass(frozen=True)
class Answer:
    """Loss and gradients of a minibatch, fp64."""

    loss: float
    logprob_N: Tensor
    entropy_N: Tensor

    @property
    def gradient(self) -> Tensor:
        """Both, one after the other."""
        return torch.cat((self.logprob_N, self.entropy_N))

    @property
    def finite(self) -> bool:
        """Whether all of it is."""
        return math.isfinite(self.loss) and bool(torch.isfinite(self.gradient).all())


def answer(loss: Loss, batch: Batch, case: Case) -> Answer:
    """What the parts of a case's layout add up to."""
    x = batch.logprob.to(case.dtype, copy=True).requires_grad_()
    h = batch.entropy.to(case.dtype, copy=True).requires_grad_()
    total = 0.0
    for part in parts_of(batch, x, h, case.layout, case.padding):
        value = loss(part)
        if value.requires_grad:
            value.backward()
        total += float(value.detach())
    return Answer(total, gradient(x).double(), gradient(h).double())


def right_answer(method: Method, batch: Batch) -> tuple[Answer, float]:
    """The reference's, and the sum of the absolute values that its loss adds up."""
    outcome, x_grad, h_grad = expected(method, batch)
    return Answer(float(outcome.loss.detach()), x_grad, h_grad), outcome.magnitude


def errors(got: Answer, right: Answer, magnitude: float) -> tuple[float, float]:
    """Of the loss and of the gradients; nan counts as infinite."""
    norm = float(right.gradient.norm())
    of_loss = abs(got.loss - right.loss) / max(1.0, magnitude)
    of_gradient = float((got.gradient - right.gradient).norm()) / (norm or 1.0)
    return (of_loss if of_loss == of_loss else math.inf), (of_gradient if of_gradient == of_gradient else math.inf)
