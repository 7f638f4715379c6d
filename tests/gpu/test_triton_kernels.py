"""The Triton kernels on a GPU against fp64: values, gradients, the logits overwritten, more than 2^31 elements."""

import pytest
import torch

from tepo_megatron.ops import output_layer
from tepo_megatron.ops.output_layer import output_layer_stats
from tepo_megatron.ops.vocab_parallel import token_stats
from tests.token_statistics import reference

DEVICE, VOCAB, PADDED = torch.device("cuda"), 151_936, 152_064


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def case(rows: int, dtype: torch.dtype, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits whose columns from VOCAB on are padding, labels, and the gradients of both outputs."""
    generator = torch.Generator(DEVICE).manual_seed(rows)
    logits = torch.randn(rows, PADDED, device=DEVICE, generator=generator).mul_(3).add_(shift).to(dtype)
    logits[:, VOCAB:] = 1e4
    labels = torch.randint(0, VOCAB, (rows,), device=DEVICE, generator=generator)
    return logits, labels, torch.randn(2, rows, device=DEVICE, generator=generator)


@pytest.mark.parametrize("shift", [0.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_equal_fp64(dtype: torch.dtype, shift: float) -> None:
    source, labels, gradients = case(64, dtype, shift)
    logits = source.clone().requires_grad_() * 1  # not a leaf, so that backward writes in its place
    stats = token_stats(logits, labels, 1.0, None, VOCAB, backend="triton")
    (gradient,) = torch.autograd.grad([stats.logprob_R, stats.entropy_R], logits, list(gradients))
    exact = source.double().requires_grad_()
    logprob, entropy = reference(exact, labels, 1.0, VOCAB)
    (expected,) = torch.autograd.grad([logprob, entropy], exact, list(gradients.double()))
    assert (stats.logprob_R - logprob).abs().max() <= max(2e-6, 1e-7 * logprob.abs().max().item())
    assert (stats.entropy_R - entropy).abs().max() <= 2e-6
    assert gradient.data_ptr() == logits.data_ptr() and gradient[:, VOCAB:].abs().max() == 0
    if dtype == torch.float32:
        assert relative(gradient, expected) <= 1e-5
    else:  # rounded to bf16 once, and no more
        assert relative(gradient, expected) <= 1.001 * relative(expected.to(dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [32_001, 32_016, 32_128])
def test_padding_of_any_value_never_reaches_a_result(width: int, dtype: torch.dtype) -> None:
    """32001 columns: with a width of 32001 the accesses are narrow; padded, they are of 16 bytes and reach into NaN."""
    columns = 32_001
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(65, columns, device=DEVICE, generator=generator).mul_(3).to(dtype)
    labels = torch.randint(0, columns, (65,), device=DEVICE, generator=generator)
    gradients = torch.randn(2, 65, device=DEVICE, generator=generator)
    padded = torch.nn.functional.pad(logits, (0, width - columns), value=float("nan")).requires_grad_() * 1
    stats = token_stats(padded, labels, 1.0, None, columns, backend="triton")
    (gradient,) = torch.autograd.grad([stats.logprob_R, stats.entropy_R], padded, list(gradients))
    exact = logits.double().requires_grad_()
    logprob, entropy = reference(exact, labels, 1.0, columns)
    (expected,) = torch.autograd.grad([logprob, entropy], exact, list(gradients.double()))
    assert (stats.logprob_R - logprob).abs().max() <= 4e-6 and (stats.entropy_R - entropy).abs().max() <= 2e-6
    rounding = 1e-5 if dtype == torch.float32 else 1.001 * relative(expected.to(dtype), expected)
    assert relative(gradient[:, :columns], expected) <= rounding
    assert torch.equal(gradient[:, columns:], torch.zeros_like(gradient[:, columns:]))


def test_more_elements_than_an_int32_counts() -> None:
    """The last rows of many equal those rows alone, bit for bit."""
    rows, last = 2**31 // PADDED + 64, 32
    if torch.cuda.mem_get_info()[0] < 8 * rows * PADDED:
        pytest.skip("the GPU's memory does not suffice")
    source = torch.zeros(rows, PADDED, dtype=torch.bfloat16, device=DEVICE)
    source[-last:], some_labels, some_gradients = case(last, torch.bfloat16)
    labels = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    labels[-last:] = some_labels
    gradients = torch.ones(2, rows, device=DEVICE)
    gradients[:, -last:] = some_gradients

    def run(x: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        z = x.clone().requires_grad_() * 1
        stats = token_stats(z, y, 1.0, None, VOCAB, backend="triton")
        (gradient,) = torch.autograd.grad([stats.logprob_R, stats.entropy_R], z, list(g))
        return [stats.logprob_R[-last:], stats.entropy_R[-last:], gradient[-last:]]

    alone = run(source[-last:], some_labels, some_gradients)
    assert all(map(torch.equal, run(source, labels, gradients), alone))


@pytest.mark.parametrize("budget", [0, 2**40], ids=["logits computed again", "logits kept"])
def test_the_output_layer_equals_fp64(budget: int) -> None:
    """bf16 on tensor cores; against fp64 on the logits that it rounds to bf16, the weight's gradient summed in fp32."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(1500, 256, device=DEVICE, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(9000, 256, device=DEVICE, generator=generator).mul_(256**-0.5 * 3).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(9000, 256, device=DEVICE)
    labels = torch.randint(0, 9000, (1500,), device=DEVICE, generator=generator)
    gradients = torch.randn(2, 1500, device=DEVICE, generator=generator)
    stats = output_layer_stats(hidden, weight, labels, 1.0, None, logits_budget=budget, backend="triton")
    torch.autograd.backward([stats.logprob_R, stats.entropy_R], list(gradients))
    logits = (hidden @ weight.t()).detach().double().requires_grad_()
    logprob, entropy = reference(logits, labels, 1.0, 9000)
    (expected,) = torch.autograd.grad([logprob, entropy], logits, list(gradients.double()))
    # the chunks' products may round some logits to the neighbouring bf16 number
    assert relative(stats.logprob_R, logprob) <= 1e-3 and relative(stats.entropy_R, entropy) <= 1e-3
    assert hidden.grad is not None and weight.grad is None
    assert relative(hidden.grad, expected @ weight.double()) <= 0.01
    assert relative(weight.main_grad, expected.t() @ hidden.double()) <= 0.005


@pytest.mark.parametrize("within", [True, False], ids=["addmm", "mm then add"])
def test_products_of_bf16_added_in_fp32(monkeypatch: pytest.MonkeyPatch, within: bool) -> None:
    """Against fp64, into a sum that holds something already; the form of PyTorch 2.10 makes no fp32 temporary."""
    if within and not output_layer.ADDS_WITHIN_PRODUCT:
        pytest.skip("this PyTorch adds only after the product")
    monkeypatch.setattr(output_layer, "ADDS_WITHIN_PRODUCT", within)
    generator = torch.Generator(DEVICE).manual_seed(0)
    gradient = torch.randn(1024, 9008, device=DEVICE, generator=generator).bfloat16()
    hidden = torch.randn(1024, 512, device=DEVICE, generator=generator).bfloat16()
    total = torch.randn(9008, 512, device=DEVICE, generator=generator)
    exact = total.double()
    for repetition in range(2):  # the first call may allocate cuBLAS's workspace
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output_layer.add_product(total, gradient, hidden)
        extra = torch.cuda.max_memory_allocated() - before
        exact += gradient.double().t() @ hidden.double()
        if repetition:
            assert extra == 0 if within else 0 < extra <= 2 * 4096 * 512 * 4
    assert relative(total, exact) <= 1e-5
