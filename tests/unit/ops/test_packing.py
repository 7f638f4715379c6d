"""Packed microbatches: every token once, on the right rank, with the right label."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.packing import pack


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=7),
    cp=st.sampled_from([1, 2, 3, 4]),
    total=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 100),
)
def test_packing_keeps_every_response_token(shapes: list[tuple[int, int]], cp: int, total: int, seed: int) -> None:
    """Each response token is one row on one context-parallel rank, whose position precedes it in its own sequence."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, 1000, (p + r,), generator=generator) for p, r in shapes]
    masks = [torch.arange(p + r) >= p for p, r in shapes]
    first = [sum(r for _, r in shapes[:i]) for i in range(len(shapes))]
    order = torch.randperm(len(shapes), generator=generator).tolist()
    alignment = Alignment(cp=cp, total=total)
    labels: dict[int, int] = {}
    for rank in range(cp):
        m = pack(ids, masks, first, order, alignment, rank)
        assert m.tokens_S.shape == (1, int(m.cu_seqlens[-1]) // cp)
        assert m.tokens_S.numel() % total == 0
        assert bool(((m.cu_seqlens[1:] - m.cu_seqlens[:-1]) % alignment.sequence == 0).all())
        assert m.lengths_G.tolist() == [shapes[i][1] for i in order] and m.sequences_G.tolist() == order
        for row, label, g, place in zip(m.rows_R, m.labels_R, m.sequence_R, m.token_R, strict=True):
            assert int(place) not in labels
            labels[int(place)] = int(label)
            i = order[int(g)]
            t = int(place) - first[i]  # this row predicts response token t of sequence i
            assert int(m.tokens_S[0, row]) == int(ids[i][shapes[i][0] + t - 1])
    expected = torch.cat([x[m] for x, m in zip(ids, masks, strict=True)]).tolist()
    assert [labels[k] for k in range(len(expected))] == expected


def test_several_turns_in_one_sequence() -> None:
    """A mask with gaps (tool output between two turns) keeps each response token's place."""
    ids, mask = torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([False, True, False, False, True, True])
    m = pack([ids], [mask], [100], [0], Alignment(), 0)
    assert m.labels_R.tolist() == [6, 9, 10] and m.token_R.tolist() == [100, 101, 102] and m.rows_R.tolist() == [0, 3, 4]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    cp=st.sampled_from([1, 2, 3, 4]),
    total=st.sampled_from([1, 2, 3, 8]),
    spare=st.integers(0, 50),
)
def test_sequences_within_the_token_capacity_fit_with_all_padding(lengths: list[int], cp: int, total: int, spare: int) -> None:
    """`Alignment.capacity` counts sequences padded one by one; the padding of the total never exceeds max_tokens."""
    alignment = Alignment(cp=cp, total=total)
    each = sum(alignment.padded_one(n) for n in lengths)
    max_tokens = max(each + spare, alignment.step)
    if each <= alignment.capacity(max_tokens):
        assert each <= sum(alignment.padded(lengths)) <= max_tokens
    else:  # the padding of the total does not fit
        assert sum(alignment.padded(lengths)) > max_tokens
