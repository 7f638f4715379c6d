"""Metrics that add up over ranks, microbatches and updates: (numerator, denominator) pairs, and logarithmic histograms."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_PER_DECADE = 32  # bins per decade; a quantile is exact to half a bin, 3.7 %
_SMALLEST, _DECADES = 1e-9, 11  # magnitudes below 1e-9 count as 0, above 100 as 100
_SIDE = _PER_DECADE * _DECADES
BINS = 2 * _SIDE + 1  # negative, largest first; zero; positive, smallest first


def counts(x: Tensor, where: Tensor | None = None) -> Tensor:
    """Count the entries of `x` per bin, without gradient or synchronisation. NaN counts as 0.

    `where`: bool mask of the same shape that selects the entries. None: all. Returns int64 [BINS] on the device of `x`.
    """
    x = x.detach().double()
    step = (x.abs() / _SMALLEST).log10().mul(_PER_DECADE).floor().clamp(-1, _SIDE - 1) + 1  # 0 below _SMALLEST
    index = (step * x.sign()).nan_to_num().long().flatten() + _SIDE
    weight = torch.ones_like(index) if where is None else where.long()
    return torch.zeros(BINS, dtype=torch.int64, device=x.device).index_add_(0, index, weight)


def quantiles(bins: Tensor, shares: Sequence[float]) -> list[float | None]:
    """Return quantiles of a histogram.

    Args:
        bins: int64 [BINS] from `counts`, or a sum of such tensors.
        shares: Quantile levels in [0, 1].
    Returns:
        For each level, the geometric middle of the bin that contains it; None for every level if the histogram is empty.
    """
    through = bins.cumsum(0)
    total = int(through[-1])
    if total == 0:
        return [None] * len(shares)
    wanted = torch.tensor([max(1, round(share * total)) for share in shares])
    return [_middle(int(i) - _SIDE) for i in torch.searchsorted(through.cpu(), wanted)]


def _middle(step: int) -> float:
    if step == 0:
        return 0.0
    magnitude = _SMALLEST * 10 ** ((abs(step) - 0.5) / _PER_DECADE)
    return magnitude if step > 0 else -magnitude


Pair = tuple[float, float]


class Metrics:
    """Sums of numerators and denominators by name. `means()` divides at the end.

    >>> m = Metrics(); m.add("reward/mean", 3.0, 4.0); m.add("reward/mean", 1.0, 4.0); m.means()
    {'reward/mean': 0.5}
    """

    def __init__(self, pairs: Mapping[str, Sequence[float]] | None = None) -> None:
        self._pairs: dict[str, Pair] = {name: (n, d) for name, (n, d) in (pairs or {}).items()}

    def pairs(self) -> dict[str, Pair]:
        """Return the sums by name, as plain JSON from which the object can be rebuilt."""
        return dict(self._pairs)

    def add(self, name: str, numerator: float, denominator: float = 1.0) -> None:
        """Add one contribution."""
        n, d = self._pairs.get(name, (0.0, 0.0))
        self._pairs[name] = (n + float(numerator), d + float(denominator))

    def means(self) -> dict[str, float | None]:
        """Return name -> numerator / denominator; None if the denominator is 0 or the value is not finite (JSON has no NaN)."""
        means = {name: n / d if d else math.nan for name, (n, d) in self._pairs.items()}
        return {name: mean if math.isfinite(mean) else None for name, mean in means.items()}
