"""The covering arrays of tests: each pair is there, and most combinations are not."""

import itertools

import pytest

from tests.pairwise import pairs_of, pairwise


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 4), (3, 4, 4, 3), (1, 3)], ids=str)
def test_every_pair_is_in_a_row(sizes: tuple[int, ...]) -> None:
    factors = [[f"{factor}{value}" for value in range(size)] for factor, size in enumerate(sizes)]
    rows = pairwise(*factors)
    combinations = list(itertools.product(*factors))
    assert set().union(*map(pairs_of, rows)) == set().union(*map(pairs_of, combinations))
    assert len(rows) == len(set(rows)) and set(rows) <= set(combinations)
    least = max(a * b for a, b in itertools.combinations(sizes, 2))
    assert least <= len(rows) <= 1.5 * least
