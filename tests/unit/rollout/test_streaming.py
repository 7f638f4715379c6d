"""Minibatches of groups that arrive one by one: those of whole batches, or in the order of arrival."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from tepo_megatron.rollout.streaming import Minibatch, MinibatchStream, OrderedGroups
from tepo_megatron.types import Rollout, SamplingMask, TokenStats, TrainBatch
from tepo_megatron.types.batch import join_minibatches

SAMPLES, SEED = 3, 11


def group(prompt: int) -> list[Rollout]:
    length = 3 + prompt % 4
    mask = torch.arange(length) > 0
    return [
        Rollout(prompt, torch.full((length,), 10 * prompt + i), mask, -0.5 * mask, 0, "stop", reward=float(i), score=float(i))
        for i in range(SAMPLES)
    ]


def streamed(how: str, groups: int, minibatch_prompts: int, order: list[int]) -> tuple[MinibatchStream, list[Minibatch]]:
    """Return the stream after all groups, and the minibatches, the last one included."""
    found: list[Minibatch] = []
    stream = MinibatchStream(how, groups, minibatch_prompts, SEED, found.append)  # type: ignore[arg-type]
    for place in order:
        stream.add(place, group(place))
    return stream, [*found, stream.finish()]


@pytest.mark.parametrize(("groups", "minibatch_prompts"), [(8, 2), (7, 3), (5, 1), (6, 4), (1, 1)])
def test_by_prompt_the_minibatches_are_those_of_the_whole_batch(groups: int, minibatch_prompts: int) -> None:
    batch = TrainBatch.build([r for g in range(groups) for r in group(g)], torch.zeros(groups * SAMPLES))
    expected = list(batch.epochs(1, minibatch_prompts, SEED))
    for seed in range(5):
        order = list(range(groups))
        random.Random(seed).shuffle(order)
        stream, found = streamed("prompt", groups, minibatch_prompts, order)
        assert [m.ids for m in found] == [b.ids_B.tolist() for b in expected if b.ids_B is not None]
        for minibatch, of_batch in zip(found, expected, strict=True):
            pairs = zip(minibatch.rollouts, of_batch.rollouts, strict=True)
            assert all(torch.equal(a.token_ids_L, b.token_ids_L) for a, b in pairs)
        assert [r.prompt_id for r in stream.rollouts] == [r.prompt_id for r in batch.rollouts]


def test_a_minibatch_is_handed_out_with_its_last_group_and_not_before_those_ahead_of_it() -> None:
    found: list[Minibatch] = []
    stream = MinibatchStream("prompt", 6, 2, SEED, found.append)
    order = TrainBatch.build([r for g in range(6) for r in group(g)], torch.zeros(18)).epochs(1, 2, SEED)
    first, second, last = ([*dict.fromkeys(r.prompt_id for r in m.rollouts)] for m in order)
    counts = []
    for place in [*second, first[0], *last, first[1]]:
        stream.add(place, group(place))
        counts.append(len(found))
    assert counts == [0, 0, 0, 0, 0, 2] and stream.prompts == [first, second, last]


def test_by_arrival_the_groups_come_in_their_order_with_ids_in_it() -> None:
    stream, found = streamed("arrival", 7, 3, [4, 0, 6, 2, 1, 5, 3])
    assert stream.prompts == [[4, 0], [6, 2], [1, 5, 3]] and [len(m.ids) for m in found] == [6, 6, 9]
    assert list(itertools.chain(*(m.ids for m in found))) == list(range(21))


def test_by_arrival_fewer_groups_make_a_smaller_last_minibatch_or_none() -> None:
    assert streamed("arrival", 6, 2, [4, 0, 5])[0].prompts == [[4, 0], [5]]
    assert streamed("arrival", 6, 2, [4, 0])[0].prompts == [[4, 0], []]
    assert streamed("arrival", 6, 2, [])[0].prompts == [[]]


def test_minibatches_join_to_the_batch_that_they_divide() -> None:
    rollouts = [replace(r, sampling_mask=SamplingMask.from_rows(torch.arange(2 * r.response_length).view(-1, 2)))
                for g in range(5) for r in group(g)]  # fmt: skip
    whole = TrainBatch.build(rollouts, torch.arange(15.0))
    stats_N = TokenStats(torch.arange(float(whole.num_tokens)), -torch.arange(float(whole.num_tokens)))
    masks = SamplingMask.cat([r.sampling_mask for r in rollouts if r.sampling_mask is not None])
    whole = replace(whole.with_old_stats(stats_N), recomputed_mask=masks, ref_logprobs_N=stats_N.logprob_R + 0.5)
    joined = join_minibatches(list(whole.epochs(1, 2, SEED)))
    assert joined.ids_B is not None and joined.ids_B.tolist() == list(range(15)) and joined.update == 0
    for name in ("advantages_B", "old_logprobs_N", "old_entropies_N", "ref_logprobs_N"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    assert joined.recomputed_mask is not None and torch.equal(joined.recomputed_mask.ids_M, masks.ids_M)
    assert [r.prompt_id for r in joined.rollouts] == [r.prompt_id for r in whole.rollouts]
    later, second = list(joined.epochs(2, 2, SEED, made=1, update=3)), list(whole.epochs(2, 2, SEED))[3:]
    assert [m.ids_B.tolist() for m in later] == [m.ids_B.tolist() for m in second]  # type: ignore[union-attr]
    assert [m.update for m in later] == [3, 4, 5]


def test_a_minibatch_does_not_wait_for_the_group_after_it() -> None:
    """Groups are added by the thread that grades them, in the order of their arrival, and an error is not lost."""
    found: list[Minibatch] = []
    stream = MinibatchStream("arrival", 6, 2, SEED, found.append)
    ordered = OrderedGroups(stream, lambda graded: [graded.result()] if graded.result()[0].prompt_id != 5 else [])
    gradings: dict[int, Future[list[Rollout]]] = {place: Future() for place in (4, 5, 0, 2)}
    for place, grading in gradings.items():
        ordered.submit(place, grading)
    for place in (0, 5):
        gradings[place].set_result(group(place))
    assert found == [], "the first one is not graded yet"
    gradings[4].set_result(group(4))
    assert [sorted({r.prompt_id for r in m.rollouts}) for m in found] == [[0, 4]], "group 5 is not learned from"
    gradings[2].set_exception(ValueError("the grader failed"))
    with pytest.raises(ValueError, match="the grader failed"):
        ordered.add_graded()
