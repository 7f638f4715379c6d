"""Split a range of a flattened array into slices, which are rectangular parts of the array."""

import math
from collections.abc import Iterator

Sizes = tuple[int, ...]


def split_range(start: int, stop: int, shape: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    """Split the elements [start, stop) of a row-major array into the fewest slices.

    Yields:
        (offset, sizes) of each slice, in row-major order; at most 2 * len(shape) - 1 slices.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows that are wholly inside: [first, last)
    if first > last:  # the range lies inside one row
        yield from _within(last, start - last * row, stop - last * row, shape)
        return
    if start < first * row:
        yield from _within(first - 1, start - (first - 1) * row, row, shape)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within(last, 0, stop - last * row, shape)


def ranges(start: int, stop: int, shape: Sizes, limit: int) -> Iterator[tuple[int, int]]:
    """Split [start, stop) at row boundaries into ranges of about `limit` elements."""
    row = max(1, math.prod(shape[1:]))
    stride = max(1, limit // row) * row
    while start < stop:
        end = min(stop, (start // stride + 1) * stride)
        yield start, end
        start = end


def _within(row: int, start: int, stop: int, shape: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    for offset, sizes in split_range(start, stop, shape[1:]):
        yield (row, *offset), (1, *sizes)
