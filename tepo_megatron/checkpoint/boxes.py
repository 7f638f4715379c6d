"""A range of a flattened array as boxes of the array."""

from __future__ import annotations

import math
from collections.abc import Iterator

Sizes = tuple[int, ...]


def boxes(start: int, stop: int, shape: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    """The elements [start, stop) of a row-major array, as the fewest boxes (offset, sizes), in their order.

    They are at most 2 * len(shape) - 1. The array has at least one dimension.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows are [first, last)
    if first > last:  # all within one row
        yield from _within(last, start - last * row, stop - last * row, shape)
        return
    if start < first * row:
        yield from _within(first - 1, start - (first - 1) * row, row, shape)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within(last, 0, stop - last * row, shape)


def ranges(start: int, stop: int, shape: Sizes, limit: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut after whole rows into ranges of about `limit` elements (a row may have more)."""
    row = max(1, math.prod(shape[1:]))
    stride = max(1, limit // row) * row
    while start < stop:
        end = min(stop, (start // stride + 1) * stride)
        yield start, end
        start = end


def _within(row: int, start: int, stop: int, shape: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    for offset, sizes in boxes(start, stop, shape[1:]):
        yield (row, *offset), (1, *sizes)
