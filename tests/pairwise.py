"""Covering arrays of strength 2: every pair of values of two factors is in a row, in far fewer rows than all combinations."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairs_of(row: Sequence[Any]) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    """Return the pairs of a row's values, each value with the number of its factor."""
    return set(itertools.combinations(enumerate(row), 2))


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows that together have every pair, the same ones in every process."""
    candidates = list(itertools.product(*factors))
    missing = set().union(*(pairs_of(row) for row in candidates))
    rows = []
    while missing:
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))  # the first of equals
        rows.append(best)
        missing -= pairs_of(best)
    return rows
