"""The emulation of FP8 in benchmarks/precision.py, and the figures that docs/precision.md shows."""

import json
from pathlib import Path

import torch

from benchmarks import precision

FOUND = json.loads(precision.OUT.read_text())


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_e4m3_has_three_bits_of_mantissa() -> None:
    x = values(40, 300)
    for back in (precision.rounded_by_tensor(x), precision.rounded_by_block(x, 1), precision.rounded_by_block(x, 128)):
        assert back.shape == x.shape and not torch.equal(back, x)
        large = x.abs() > x.abs().max() / 1000  # e4m3 keeps fewer bits of smaller numbers
        assert ((back - x).abs() / x.abs())[large].max() <= 2**-4 * (1 + 1e-6)
        assert back.unique().numel() < 1000 * 40


def test_what_shares_a_scale_with_what() -> None:
    """A token of its own scale does not see the others; under one scale for all, an outlier costs everybody."""
    x, outlier = values(16, 256), values(16, 256)
    outlier[0] = 1e6
    outlier[1:] = x[1:]
    assert torch.equal(precision.rounded_by_block(outlier, 1)[1:], precision.rounded_by_block(x, 1)[1:])
    assert not torch.equal(precision.rounded_by_block(outlier, 128)[1:], precision.rounded_by_block(x, 128)[1:])
    assert not torch.equal(precision.rounded_by_tensor(outlier)[1:], precision.rounded_by_tensor(x)[1:])


def test_scales_of_blocks_are_powers_of_two() -> None:
    x = values(8, 128)
    assert torch.equal(precision.rounded_by_block(2 * x, 1), 2 * precision.rounded_by_block(x, 1))
    assert torch.equal(precision.rounded_by_block(torch.zeros(3, 200), 1), torch.zeros(3, 200))


def test_the_page_shows_what_was_measured() -> None:
    page = Path("docs/precision.md").read_text()
    assert precision.table(FOUND["results"]) in page and f"over {FOUND['tokens']} tokens" in page


def test_the_figures_agree_with_themselves() -> None:
    results = FOUND["results"]
    assert list(results) == list(precision.VARIANTS)
    assert all(not any(results["fp32"]["flips"]) and x["mask_share"] > 0.05 for x in results.values())
    assert 0 < results["bf16"]["logprob_mean"] < results["fp8-current, emulated"]["logprob_mean"]
    assert results["fp8-blockwise, emulated"]["noise"] < results["fp8-current, emulated"]["noise"]
