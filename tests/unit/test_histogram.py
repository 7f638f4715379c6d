"""Histograms of parts add up to that of the whole, and quantiles are exact to half a bin."""

import math

import torch

from tepo_megatron.monitor.metrics import BINS, counts, quantiles


def test_quantiles_are_exact_to_half_a_bin() -> None:
    x = torch.randn(20001, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-3
    shares = (0.01, 0.05, 0.3, 0.7, 0.95, 0.99)
    found = quantiles(counts(x), shares)
    for share, value in zip(shares, found, strict=True):
        exact = x.quantile(share).item()
        assert value is not None and abs(value / exact - 1) < 0.04


def test_parts_add_up_to_the_whole() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(counts(x[:300]) + counts(x[300:]), counts(x))
    assert counts(x).sum() == 1000 and counts(x).numel() == BINS


def test_zeros_extremes_and_nothing() -> None:
    x = torch.tensor([0.0, -0.0, 1e-12, math.nan, math.inf, -math.inf, 1e9])
    bins = counts(x)
    assert bins[BINS // 2] == 4 and bins[-1] == 2 and bins[0] == 1
    assert quantiles(bins, (0.4,)) == [0.0]
    assert quantiles(counts(torch.empty(0)), (0.5, 0.9)) == [None, None]
