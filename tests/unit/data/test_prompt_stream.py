"""The prompt stream: what a batch holds, how sets are mixed, and that it resumes exactly."""

import json
from collections import Counter

import pytest

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.types import Prompt
from tepo_megatron.data import PromptStream


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=i, token_ids=(1, i), answer=str(i)) for i in range(count)]


def ids(batch: list[Prompt]) -> list[int]:
    return [prompt.id for prompt in batch]


def test_stream_in_file_order() -> None:
    stream = PromptStream(prompts(5), seed=0, shuffle=False)
    assert [ids(stream.take(2)) for _ in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_stream_shuffles_each_epoch_in_a_new_order_equal_on_every_rank() -> None:
    stream = PromptStream(prompts(8), seed=3, shuffle=True)
    epochs = [ids(stream.take(8)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # pinned: a change of the order would change every run and break every resume
    assert epochs[0] == [0, 7, 5, 6, 1, 2, 4, 3]
    assert ids(PromptStream(prompts(8), seed=4, shuffle=True).take(8)) != epochs[0]


@pytest.mark.parametrize(("count", "n"), [(5, 3), (5, 4), (5, 5), (7, 3)])
def test_stream_batches_hold_no_prompt_twice(count: int, n: int) -> None:
    stream = PromptStream(prompts(count), seed=1, shuffle=True)
    seen: Counter[int] = Counter()
    for _ in range(60):
        batch = ids(stream.take(n))
        assert len(set(batch)) == n
        seen.update(batch)
    assert min(seen.values()) >= 0.6 * max(seen.values())


def test_stream_refills_with_other_prompts() -> None:
    stream = PromptStream(prompts(5), seed=1, shuffle=True)
    for _ in range(10):
        first = ids(stream.take(3))
        assert not set(first) & set(ids(stream.take(2, excluding=first)))
    with pytest.raises(DataError, match=r"data\.train has 5 prompts, 3 of them .*rollout\.prompts_per_step"):
        stream.take(3, excluding=first)
    with pytest.raises(DataError, match=r"data\.train has 5 prompts"):
        stream.take(6)


@pytest.mark.parametrize("shuffle", [True, False])
def test_stream_resumes_exactly(shuffle: bool) -> None:
    stream = PromptStream(prompts(7), seed=5, shuffle=shuffle)
    for _ in range(5):
        stream.take(3)
        state = json.loads(json.dumps(stream.state_dict()))
        resumed = PromptStream(prompts(7), seed=5, shuffle=shuffle)
        resumed.load_state_dict(state)
        expected = [ids(stream.take(3)) for _ in range(6)]
        assert [ids(resumed.take(3)) for _ in range(6)] == expected
        stream.load_state_dict(state)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PromptStream(prompts(8), seed=5, shuffle=True), "count was 7 and is 8"),
        (PromptStream([*prompts(6), Prompt(6, (1, 6), "7")], seed=5, shuffle=True), "fingerprint"),
        (PromptStream(prompts(7), seed=6, shuffle=True), "seed was 5 and is 6"),
        (PromptStream(prompts(7), seed=5, shuffle=False), "shuffle"),
    ],
    ids=["count", "answers", "seed", "shuffle"],
)
def test_stream_refuses_the_state_of_another(other: PromptStream, message: str) -> None:
    stream = PromptStream(prompts(7), seed=5, shuffle=True)
    before = other.state_dict()
    with pytest.raises(DataError, match=message):
        other.load_state_dict(stream.state_dict())
    assert other.state_dict() == before


def test_stream_needs_prompts() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptStream([], seed=0, shuffle=True)


def mixed(*sizes_and_weights: tuple[int, float], seed: int = 5, shuffle: bool = True) -> PromptStream:
    """Sets whose ids start at 0, 1000, 2000 ..."""
    sets = [
        ([Prompt(1000 * number + i, (1, i), str(i)) for i in range(size)], weight)
        for number, (size, weight) in enumerate(sizes_and_weights)
    ]
    return PromptStream.mixed(sets, seed, shuffle)


def shares(batch: list[Prompt]) -> Counter[int]:
    return Counter(prompt.id // 1000 for prompt in batch)


def test_sets_are_mixed_by_weight_whatever_their_size() -> None:
    """At any point, each set has given its share of the prompts to within one."""
    stream = mixed((100, 0.5), (40, 3.0), (7, 1.5))
    given: Counter[int] = Counter()
    for n in range(1, 200):
        given.update(shares(stream.take(1)))
        assert all(abs(given[i] - n * share) <= 1 for i, share in enumerate((0.1, 0.6, 0.3)))
    assert given[2] > 7  # the small one started again


def test_each_set_of_a_mixture_goes_in_its_own_order() -> None:
    """A set has the order that it has alone; adding or removing other sets does not change it."""
    together = [p.id for p in mixed((8, 1.0), (8, 1.0)).take(16) if p.id < 1000]
    assert together == ids(PromptStream(prompts(8), seed=5, shuffle=True).take(8))


def test_a_batch_takes_from_others_what_a_small_set_lacks() -> None:
    stream = mixed((2, 9.0), (30, 1.0))
    for _ in range(5):
        batch = stream.take(10)
        assert len(set(ids(batch))) == 10 and shares(batch) == {0: 2, 1: 8}
    with pytest.raises(DataError, match=r"data\.train has 32 prompts"):
        stream.take(33)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mixture_resumes_exactly(shuffle: bool) -> None:
    stream = mixed((7, 1.0), (5, 2.5), shuffle=shuffle)
    for _ in range(6):
        stream.give_back(stream.take(4)[2:])
        state = json.loads(json.dumps(stream.state_dict()))
        expected = [ids(stream.take(4)) for _ in range(8)]
        resumed = mixed((7, 1.0), (5, 2.5), shuffle=shuffle)
        resumed.load_state_dict(state)
        assert [ids(resumed.take(4)) for _ in range(8)] == expected
        stream.load_state_dict(state)
    other = mixed((7, 1.0), (5, 2.0), shuffle=shuffle)
    with pytest.raises(DataError, match=r"weights was \[1\.0, 2\.5\] and is \[1\.0, 2\.0\]"):
        other.load_state_dict(state)


def test_one_set_has_the_state_that_it_always_had() -> None:
    """A checkpoint of before there were mixtures goes on."""
    stream = PromptStream.mixed([(prompts(7), 2.0)], seed=5, shuffle=True)
    stream.take(3)
    state = stream.state_dict()
    assert state.keys() == {"epoch", "position", "returned", "seed", "shuffle", "count", "fingerprint"}
    assert state == {**state, "epoch": 0, "position": 3, "fingerprint": "a4158900b7c0ef55fa5858d804c9347f"}
    resumed = PromptStream(prompts(7), seed=5, shuffle=True)
    resumed.load_state_dict(state)
    assert ids(resumed.take(9 - 2)) == ids(stream.take(9 - 2))


def test_ids_are_unique_over_all_sets() -> None:
    with pytest.raises(DataError, match="same id"):
        PromptStream.mixed([(prompts(3), 1.0), (prompts(2), 1.0)], seed=0, shuffle=True)


def test_prompts_that_the_step_holds_stay_returned_in_their_order() -> None:
    stream = PromptStream(prompts(9), seed=0, shuffle=False)
    stream.give_back(stream.take(5))
    assert ids(stream.take(2, excluding=[0, 2])) == [1, 3]
    assert stream.state_dict()["returned"] == [0, 2, 4]
    assert ids(stream.take(4)) == [0, 2, 4, 5]


def test_a_returned_prompt_is_not_taken_twice_where_the_next_epoch_begins() -> None:
    stream = PromptStream(prompts(5), seed=0, shuffle=False)
    stream.give_back(stream.take(5)[:2])
    assert ids(stream.take(5)) == [0, 1, 2, 3, 4]
