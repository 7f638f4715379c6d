"""token_stats against log_softmax in fp64: values, gradients, temperature, padding, dtypes (over TP: tests/parallel)."""

import pytest
import torch

from tepo_megatron.ops import vocab_parallel
from tepo_megatron.ops.vocab_parallel import token_stats


def reference(logits: torch.Tensor, labels: torch.Tensor, temperature: float, vocab_size: int) -> tuple[torch.Tensor, ...]:
    logp = torch.log_softmax(logits.double()[:, :vocab_size] / temperature, dim=-1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def both(logits: torch.Tensor, labels: torch.Tensor, temperature: float, vocab_size: int) -> tuple[list[torch.Tensor], ...]:
    """(values and the gradient of a random mix of them) of ours and of the reference."""
    mix = torch.randn(2, logits.size(0), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = []
    for fp64_reference in (False, True):
        z = logits.clone().requires_grad_()
        if fp64_reference:
            logprob, entropy = reference(z, labels, temperature, vocab_size)
        else:
            stats = token_stats(z, labels, temperature, None, vocab_size)
            logprob, entropy = stats.logprob_R, stats.entropy_R
        ((logprob * mix[0]).sum() + (entropy * mix[1]).sum()).backward()
        out.append([logprob.detach(), entropy.detach(), z.grad])
    return tuple(out)


def case(rows: int, columns: int, dtype: torch.dtype, scale: float = 3.0, shift: float = 0.0):
    generator = torch.Generator().manual_seed(rows * columns)
    logits = (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * scale + shift).to(dtype)
    return logits, torch.randint(0, columns, (rows,), generator=generator)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (7, 65), (33, 4001)])
def test_fp64_is_exact(rows: int, columns: int, temperature: float) -> None:
    logits, labels = case(rows, columns, torch.float64)
    for ours, ref in zip(*both(logits, labels, temperature, columns), strict=True):
        torch.testing.assert_close(ours, ref, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shift", [0.0, 100.0, -100.0])
def test_fp32_accuracy(shift: float) -> None:
    """Against fp64 on the same fp32 inputs, also for logits far from zero, where sum z exp(z) would lose the entropy."""
    logits, labels = case(64, 32000, torch.float32, shift=shift)
    (logprob, entropy, grad), (ref_logprob, ref_entropy, ref_grad) = both(logits, labels, 1.0, 32000)
    assert (logprob - ref_logprob).abs().max() <= 2e-6
    assert (entropy - ref_entropy).abs().max() <= 2e-6
    assert (grad - ref_grad).norm() / ref_grad.norm() <= 1e-5


def test_bf16_inputs_are_computed_in_fp32() -> None:
    logits, labels = case(16, 5000, torch.bfloat16)
    (logprob, entropy, grad), (ref_logprob, ref_entropy, ref_grad) = both(logits, labels, 0.7, 5000)
    assert logprob.dtype == torch.float32 and grad.dtype == torch.bfloat16
    assert (logprob - ref_logprob).abs().max() <= 3e-6
    assert (entropy - ref_entropy).abs().max() <= 3e-6
    assert (grad.float() - ref_grad.float()).norm() / ref_grad.float().norm() <= 1e-2  # one rounding to bf16


def test_padded_columns_get_no_probability_and_no_gradient() -> None:
    logits, labels = case(9, 50, torch.float64)
    padded = torch.cat([logits, torch.full((9, 14), 1e4, dtype=torch.float64)], dim=1)
    ours, _ = both(padded, labels, 1.0, 50)
    expected, _ = both(logits, labels, 1.0, 50)
    torch.testing.assert_close(ours[0], expected[0])
    torch.testing.assert_close(ours[1], expected[1])
    torch.testing.assert_close(ours[2][:, :50], expected[2])
    assert ours[2][:, 50:].abs().max() == 0


def test_row_chunks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = case(37, 129, torch.float32)
    whole, _ = both(logits, labels, 1.3, 129)
    monkeypatch.setattr(vocab_parallel, "CHUNK_BYTES", 4 * 129 * 5)
    chunked, _ = both(logits, labels, 1.3, 129)
    for a, b in zip(whole, chunked, strict=True):
        assert torch.equal(a, b)


def test_no_rows_give_a_connected_zero() -> None:
    logits = torch.randn(0, 11, requires_grad=True)
    stats = token_stats(logits, torch.zeros(0, dtype=torch.int64), 1.0, None)
    (stats.logprob_R.sum() + stats.entropy_R.sum()).backward()
    assert logits.grad is not None and logits.grad.shape == (0, 11)


def test_deterministic_distribution_has_zero_entropy() -> None:
    logits = torch.full((1, 8), -1e4)
    logits[0, 3] = 0.0
    stats = token_stats(logits, torch.tensor([3]), 1.0, None)
    assert stats.entropy_R.item() == 0.0 and stats.logprob_R.item() == 0.0


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_stats(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), temperature, None)


def test_labels_must_match_rows() -> None:
    with pytest.raises(ValueError, match="expected logits"):
        token_stats(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), 1.0, None)
