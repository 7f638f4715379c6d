"""token_stats against log_softmax in fp64: values, gradients, temperature, padding, dtypes (over TP: tests/parallel)."""

from typing import Any

import pytest
import torch

from tepo_megatron.ops.token_statistics import pytorch
from tepo_megatron.ops.vocab_parallel import token_stats
from tests.token_statistics import BACKENDS, device_of, fp32_bound, reference, to_bf16

Values = list[torch.Tensor]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def mixed(stats: tuple[torch.Tensor, torch.Tensor], what: str) -> torch.Tensor:
    """A scalar that depends on the outputs named, each row with its own factor."""
    rows = stats[0].numel()
    mix = torch.randn(2, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(stats[0].device)
    return sum((x * m).sum() for name, x, m in zip(("logprob", "entropy"), stats, mix, strict=True) if name in what)


def both(logits: torch.Tensor, labels: torch.Tensor, backend: str, vocab_size: int, temperature: float = 1.0,
         what: str = "logprob and entropy", **options: Any) -> tuple[Values, Values]:  # fmt: skip
    """(log-prob, entropy, gradient of a random mix of them) of ours and of the reference."""
    z = logits.to(device_of(backend), copy=True).requires_grad_()
    stats = token_stats(z, labels.to(z.device), temperature, None, vocab_size, backend=backend, **options)
    mixed((stats.logprob_R, stats.entropy_R), what).backward()
    exact = logits.to(torch.float64, copy=True).requires_grad_()
    expected = reference(exact, labels, temperature, vocab_size)
    mixed(expected, what).backward()
    assert z.grad is not None and exact.grad is not None
    return [stats.logprob_R.detach().cpu(), stats.entropy_R.detach().cpu(), z.grad.cpu()], [*expected, exact.grad]


def case(rows: int, columns: int, dtype: torch.dtype, scale: float = 3.0, shift: float = 0.0):
    generator = torch.Generator().manual_seed(rows * columns)
    logits = (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * scale + shift).to(dtype)
    return logits, torch.randint(0, columns, (rows,), generator=generator)


@pytest.mark.parametrize("shift", [0.0, 100.0, -100.0])
def test_fp32_accuracy(backend: str, shift: float) -> None:
    """Against fp64 on the same fp32 inputs, also for logits far from zero, where sum z exp(z) would lose the entropy."""
    logits, labels = case(64, 32000, torch.float32, shift=shift)
    (logprob, entropy, grad), (ref_logprob, ref_entropy, ref_grad) = both(logits, labels, backend, 32000)
    assert (logprob - ref_logprob).abs().max() <= fp32_bound(logits, 1.0, ref_logprob)
    assert (entropy - ref_entropy).abs().max() <= 2e-6
    assert (grad - ref_grad).norm() / ref_grad.norm() <= 1e-5


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("what", ["logprob", "entropy"])
def test_fp32_accuracy_of_either_gradient(backend: str, what: str, scale: float) -> None:
    """Rows are from nearly uniform to nearly certain; a certain row's gradient is a difference of nearly equal numbers."""
    logits, labels = case(16, 5000, torch.float32, scale, shift=30)
    (logprob, entropy, grad), (ref_logprob, ref_entropy, ref_grad) = both(logits, labels, backend, 5000, 0.9, what)
    assert (logprob - ref_logprob).abs().max() <= fp32_bound(logits, 0.9, ref_logprob)
    assert (entropy - ref_entropy).abs().max() <= 2e-6
    assert (grad - ref_grad).norm() / ref_grad.norm() <= 1e-5


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_bf16_inputs_are_no_worse_than_fp32_arithmetic(backend: str, temperature: float) -> None:
    """Same bf16 inputs: the plain formula in fp32 is the measure, its gradient rounded to bf16 once."""
    logits, labels = case(16, 5000, torch.bfloat16)
    (logprob, entropy, grad), (ref_logprob, ref_entropy, ref_grad) = both(logits, labels, backend, 5000, temperature)
    z = logits.float().requires_grad_()
    logp = torch.log_softmax(z / temperature, dim=-1)
    plain = (logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1))
    mixed(plain, "logprob and entropy").backward()
    assert logprob.dtype == torch.float32 and grad.dtype == torch.bfloat16
    bound = fp32_bound(logits, temperature, ref_logprob)
    assert (logprob - ref_logprob).abs().max() <= bound and (entropy - ref_entropy).abs().max() <= bound
    rounded = to_bf16(z.grad, backend).double()
    assert (grad.double() - ref_grad).norm() <= 1.001 * (rounded - ref_grad).norm()


def test_padded_columns_get_no_probability_and_no_gradient(backend: str) -> None:
    logits, labels = case(9, 50, torch.float64)
    padded = torch.cat([logits, torch.full((9, 14), 1e4, dtype=torch.float64)], dim=1)
    ours = token_stats_and_gradient(padded, labels, backend, 50)
    expected, _ = both(logits, labels, backend, 50)
    torch.testing.assert_close(ours[0], expected[0])
    torch.testing.assert_close(ours[1], expected[1])
    torch.testing.assert_close(ours[2][:, :50], expected[2])
    assert ours[2][:, 50:].abs().max() == 0


@pytest.mark.parametrize("padding", [1e4, float("inf"), float("nan")])
@pytest.mark.parametrize(("columns", "width"), [(32001, 32016), (32001, 32128), (1000, 9000), (50, 53)])
def test_padding_of_any_value_changes_no_bit(backend: str, columns: int, width: int, padding: float) -> None:
    """This also holds where the real columns are odd, several blocks are all padding, or the width is no multiple of 16."""
    logits, labels = case(3, columns, torch.bfloat16)
    padded = torch.nn.functional.pad(logits, (0, width - columns), value=padding)
    expected = token_stats_and_gradient(logits, labels, backend, columns)
    leaf = padded.to(device_of(backend)).requires_grad_()
    in_place = leaf * 1  # not a leaf, so that backward writes in its place
    stats = token_stats(in_place, labels.to(leaf.device), 1.0, None, columns, backend=backend)
    mixed((stats.logprob_R, stats.entropy_R), "logprob and entropy").backward()
    assert torch.equal(stats.logprob_R.detach().cpu(), expected[0]) and torch.equal(stats.entropy_R.detach().cpu(), expected[1])
    assert torch.equal(in_place[:, :columns].detach().cpu(), expected[2]) and in_place[:, columns:].abs().max() == 0


def token_stats_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor, backend: str, vocab_size: int, **options: Any
) -> Values:
    return both(logits, labels, backend, vocab_size, **options)[0]


def test_row_chunks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = case(37, 129, torch.float32)
    whole = token_stats_and_gradient(logits, labels, "torch", 129, temperature=1.3)
    monkeypatch.setattr(pytorch, "CPU_CHUNK_BYTES", 4 * 129 * 5)
    chunked = token_stats_and_gradient(logits, labels, "torch", 129, temperature=1.3)
    for a, b in zip(whole, chunked, strict=True):
        assert torch.equal(a, b)


def test_no_rows_give_a_connected_zero(backend: str) -> None:
    logits = torch.randn(0, 11, requires_grad=True)
    stats = token_stats(logits, torch.zeros(0, dtype=torch.int64), 1.0, None, backend=backend)
    (stats.logprob_R.sum() + stats.entropy_R.sum()).backward()
    assert logits.grad is not None and logits.grad.shape == (0, 11)


def test_a_nan_in_the_logits_reaches_both_outputs(backend: str) -> None:
    logits = torch.zeros(2, 5000, device=device_of(backend))
    logits[0, 4500] = float("nan")
    stats = token_stats(logits, torch.tensor([0, 0], device=logits.device), 1.0, None, backend=backend)
    assert stats.logprob_R.isnan().tolist() == stats.entropy_R.isnan().tolist() == [True, False]
