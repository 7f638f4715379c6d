"""The exact KL to a teacher: value and gradient against autograd in fp64, in chunks, with padding, with the other terms."""

import math

import pytest
import torch

from tepo_megatron.ops import output_layer
from tepo_megatron.ops.token_statistics import teacher as of_teacher
from tepo_megatron.ops.token_statistics.teacher import TeacherRows

ROWS, VOCAB, PADDED, HIDDEN, TEACHER_HIDDEN, TEMPERATURE = 37, 70, 80, 16, 24, 0.8


def inputs(dtype: torch.dtype, distance: float) -> list[torch.Tensor]:
    """Student's hidden states and weight, teacher's hidden states and weight, labels. `distance` 0: both have equal logits."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(PADDED, HIDDEN, generator=generator)
    more = torch.randn(ROWS, TEACHER_HIDDEN - HIDDEN, generator=generator) * distance
    of_more = torch.randn(PADDED, TEACHER_HIDDEN - HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return [*(x.to(dtype) for x in (hidden, weight, torch.cat((hidden, more), 1), torch.cat((weight, of_more), 1))), labels]


def loss_of(logprob: torch.Tensor, entropy: torch.Tensor, kl: torch.Tensor, alone: bool) -> torch.Tensor:
    factor = torch.linspace(-1, 2, ROWS).to(kl)
    loss = (kl * factor).sum() + kl.square().sum()
    return loss if alone else loss + (logprob * factor.flip(0)).sum() - 0.5 * (entropy * factor).sum()


def expected(dtype: torch.dtype, distance: float, alone: bool) -> list[torch.Tensor]:
    """The same in fp64 of the same logits, which are rounded to `dtype` like those of the output layer."""
    hidden, weight, teacher_hidden, teacher_weight, labels = inputs(dtype, distance)
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    exact = h @ w.t()
    logits = exact + ((hidden @ weight.t()).double() - exact).detach()
    log_p = torch.log_softmax(logits[:, :VOCAB] / TEMPERATURE, dim=1)
    log_q = torch.log_softmax((teacher_hidden @ teacher_weight.t()).double()[:, :VOCAB] / TEMPERATURE, dim=1)
    kl, entropy = (log_p.exp() * (log_p - log_q)).sum(1), -(log_p.exp() * log_p).sum(1)
    loss_of(log_p.gather(1, labels[:, None])[:, 0], entropy, kl, alone).backward()
    assert h.grad is not None and w.grad is not None
    return [kl.detach(), h.grad, w.grad]


def ours(dtype: torch.dtype, distance: float, alone: bool, budget: int) -> list[torch.Tensor]:
    hidden, weight, teacher_hidden, teacher_weight, labels = inputs(dtype, distance)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    stats = output_layer.output_layer_stats(
        h, w, labels, TEMPERATURE, None, VOCAB, teacher=TeacherRows(teacher_hidden, teacher_weight), logits_budget=budget
    )
    assert stats.teacher_kl_R is not None
    loss_of(stats.logprob_R, stats.entropy_R, stats.teacher_kl_R, alone).backward()
    assert h.grad is not None and w.grad is not None
    return [stats.teacher_kl_R.detach(), h.grad, w.grad]


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with log-prob and entropy"])
@pytest.mark.parametrize("budget", [0, 10**9], ids=["none kept", "all kept"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_value_and_gradient_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: float, budget: int, alone: bool
) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_ROWS", 10)
    monkeypatch.setattr(output_layer, "TEACHER_ROWS", 4)
    monkeypatch.setattr(of_teacher, "CHUNK_BYTES", 3 * VOCAB * 8)
    for found, wanted in zip(ours(dtype, 0.3, alone, budget), expected(dtype, 0.3, alone), strict=True):
        assert (found.double() - wanted).norm() <= limit * wanted.norm()


def test_close_to_the_teacher_nothing_is_lost_to_rounding() -> None:
    """The gradient is a difference that nearly cancels: it is small, and not the rounding error of its two parts."""
    kl, grad_hidden, _ = ours(torch.float32, 0.0, True, 0)
    assert kl.abs().max() <= 2e-6 and grad_hidden.abs().max() <= 2e-5
    near, wanted = ours(torch.float32, 1e-2, True, 0), expected(torch.float32, 1e-2, True)
    assert (near[1].double() - wanted[1]).norm() <= 2e-3 * wanted[1].norm()


def test_a_row_of_nothing_and_logits_far_from_zero() -> None:
    weight = torch.eye(4, HIDDEN)
    hidden = torch.zeros(1, HIDDEN)
    hidden[0, :2] = torch.tensor([2e4, 2e4 - 1])
    far = output_layer.output_layer_stats(
        hidden, weight, torch.tensor([0]), 1.0, None, teacher=TeacherRows(hidden.flip(1).roll(2, 1), weight)
    )
    p = math.e / (1 + math.e)
    assert far.teacher_kl_R is not None and far.teacher_kl_R.item() == pytest.approx(2 * p - 1, rel=1e-3)
    none = output_layer.output_layer_stats(
        hidden[:0], weight, torch.tensor([], dtype=torch.int64), 1.0, None, teacher=TeacherRows(hidden[:0], weight)
    )
    assert none.teacher_kl_R is not None and none.teacher_kl_R.shape == (0,)
