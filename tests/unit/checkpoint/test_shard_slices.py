"""A range of a flattened array is the union of its shard slices, in order."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.checkpoint.state import ranges, split_range

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def ranges_of_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges_of_shapes())
def test_shard_slices_hold_the_range_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    array = torch.arange(math.prod(shape)).view(shape)
    found = [
        array[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in split_range(start, stop, shape)
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))
    assert all(part.numel() for part in found) and len(found) <= 2 * len(shape) - 1


def test_whole_rows_are_one_box() -> None:
    assert list(split_range(6, 18, (4, 2, 3))) == [((1, 0, 0), (2, 2, 3))]
    assert list(split_range(4, 21, (4, 2, 3))) == [
        ((0, 1, 1), (1, 1, 2)),
        ((1, 0, 0), (2, 2, 3)),
        ((3, 0, 0), (1, 1, 3)),
    ]


@given(ranges_of_shapes(), st.integers(1, 40))
def test_ranges_are_cut_after_whole_rows(case: tuple[tuple[int, ...], int, int], limit: int) -> None:
    shape, start, stop = case
    cut = list(ranges(start, stop, shape, limit))
    row = math.prod(shape[1:])
    assert [i for a, b in cut for i in range(a, b)] == list(range(start, stop))
    assert all(b % row == 0 for _, b in cut[:-1])
    assert all(b - a <= max(limit, row) for a, b in cut)
    assert len(cut) <= 2 + (stop - start) // max(row, limit // row * row)
