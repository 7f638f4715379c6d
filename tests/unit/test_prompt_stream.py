"""The prompt stream: what a batch holds, how sets are mixed, and that it resumes exactly."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tepo_megatron.data import PromptStream
from tepo_megatron.errors import DataError
from tepo_megatron.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=i, token_ids=(1, i), answer=str(i)) for i in range(count)]


def ids(batch: list[Prompt]) -> list[int]:
    return [prompt.id for prompt in batch]


def test_stream_in_file_order() -> None:
    stream = PromptStream(prompts(5), seed=0, shuffle=False)
    assert [ids(stream.take(2)) for _ in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_stream_shuffles_each_epoch_anew_and_everywhere_alike() -> None:
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
