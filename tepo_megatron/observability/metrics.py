"""Metrics as (numerator, denominator) pairs, so that means over microbatches and ranks are exact."""

import math
from collections.abc import Mapping, Sequence

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
