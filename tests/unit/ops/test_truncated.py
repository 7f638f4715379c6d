"""Token statistics over sampling masks, and masks that are recomputed from logits."""

import pytest
import torch

from tepo_megatron.base.types import NO_TOKEN, SamplingMask, Truncation
from tepo_megatron.ops.output_layer import output_layer_stats
from tepo_megatron.ops.vocab_parallel import token_stats
from tests.token_statistics import fp32_bound
from tests.truncated import kept, reference, rows

TRUNCATIONS = [
    Truncation(50, 0.9),
    Truncation(50, 0.9, renormalizes=False),
    Truncation(5, 1.0),
    Truncation(-1, 0.7),
    Truncation(2, 0.01),
]


def case(number: int, columns: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    logits = torch.randn(number, columns, generator=generator, dtype=torch.float64) * scale
    return logits, torch.randint(0, columns, (number,), generator=generator)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_recomputed_masks_are_those_of_the_reference(truncation: Truncation) -> None:
    logits, labels = case(60, 257)
    labels[::2] = logits[::2].argmax(1)
    found = token_stats(logits, labels, 0.7, None, recompute=truncation).recomputed
    assert found is not None and not found.cut_R.any()
    for row, (z, label) in enumerate(zip(logits, labels.tolist(), strict=True)):
        expected = kept(z, 0.7, truncation)
        assert found.outside_R[row] == (label not in expected)
        ids = found.ids_RK[row]
        assert sorted(ids[ids != NO_TOKEN].tolist()) == sorted(expected | {label})
    assert 0 < found.outside_R.sum() < 60


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_values_and_gradients_are_those_of_the_renormalized_distribution(dtype: torch.dtype, temperature: float) -> None:
    logits, labels = case(40, 300)
    logits = logits.to(dtype)
    masks = [kept(z, temperature, Truncation(50, 0.9)) | {int(y)} for z, y in zip(logits, labels, strict=True)]
    masks[0] = {int(labels[0])}  # certain: log-prob 0, entropy 0, no gradient
    z, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    stats = token_stats(z * 1, labels, temperature, None, mask_RK=rows(masks))
    expected = reference(exact, labels, temperature, masks)
    for logprob, entropy in ((stats.logprob_R, stats.entropy_R), expected):
        (logprob.sum() - 2 * entropy.square().sum()).backward()
    assert z.grad is not None and exact.grad is not None
    if dtype == torch.float64:
        value, gradient = 1e-10, 1e-10
    else:
        value, gradient = fp32_bound(logits, temperature, expected[0]), 1e-5 if dtype == torch.float32 else 4e-3
    assert (stats.logprob_R - expected[0]).abs().max() <= value and (stats.entropy_R - expected[1]).abs().max() <= value
    assert (z.grad - exact.grad).norm() <= gradient * exact.grad.norm()
    assert torch.equal(z.grad[exact.grad == 0], torch.zeros_like(z.grad[exact.grad == 0])) and stats.entropy_R[0] == 0


def test_tokens_tied_with_the_last_of_top_k_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    found = token_stats(logits, torch.tensor([1]), 1.0, None, recompute=Truncation(2)).recomputed
    assert found is not None and sorted(i for i in found.ids_RK[0].tolist() if i >= 0) == [1, 2, 3]


@pytest.mark.parametrize("budget", [0, 2**30])
def test_the_fused_output_layer_agrees(budget: int) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1500, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(70, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 70, (1500,), generator=generator)
    recomputed = token_stats(hidden @ weight.T, labels, 0.7, None, recompute=Truncation(20, 0.9)).recomputed
    assert recomputed is not None
    grads = []
    for fused in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        how = {"mask_RK": recomputed.ids_RK, "recompute": Truncation(20, 0.9)}
        if fused:
            stats = output_layer_stats(h, w, labels, 0.7, None, logits_budget=budget, **how)
        else:
            stats = token_stats(h @ w.T, labels, 0.7, None, **how)
        (stats.logprob_R.sum() - 2 * stats.entropy_R.square().sum()).backward()
        assert stats.recomputed is not None and torch.equal(stats.recomputed.ids_RK, recomputed.ids_RK)
        grads.append((stats.logprob_R.detach(), stats.entropy_R.detach(), h.grad, w.grad))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_masks_travel_raggedly_and_are_checked() -> None:
    ids = torch.tensor([[5, NO_TOKEN, 2], [7, 1, 0], [NO_TOKEN, 9, NO_TOKEN]])
    mask = SamplingMask.from_rows(ids)
    assert mask.counts_N.tolist() == [2, 3, 1] and mask.ids_M.dtype == torch.int32 and mask.widest == 3
    assert mask.rows(torch.tensor([2, 0])).tolist() == [[9, NO_TOKEN, NO_TOKEN], [5, 2, NO_TOKEN]]
    again = SamplingMask.cat(mask.split([1, 0, 2]))
    assert torch.equal(again.ids_M, mask.ids_M) and torch.equal(again.counts_N, mask.counts_N)
    mask.check(torch.tensor([2, 1, 9]), 3)
    with pytest.raises(ValueError, match="lacks the sampled token"):
        mask.check(torch.tensor([2, 1, 8]), 3)
    with pytest.raises(ValueError, match="masks of 3 tokens, not 2"):
        mask.check(torch.tensor([2, 1]), 3)
    twice = SamplingMask(torch.tensor([4, 4], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
    with pytest.raises(ValueError, match="twice"):
        twice.check(torch.tensor([4]), 3)
