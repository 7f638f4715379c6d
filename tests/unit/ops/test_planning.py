"""Plans of microbatches: every sequence once, within the limits, the same everywhere, and little time lost."""

import itertools
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing import TARGET, longest_first, measure
from tepo_megatron.controller.step_log import KEYS
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.pipeline_time import Pipeline, one_forward_one_backward, tapered
from tepo_megatron.ops.planning import Plan, another_plan, plan_metrics, plan_microbatches, sequence_costs
from tepo_megatron.ops.shared_prompts import PrefixGroups

LENGTHS = st.lists(st.integers(2, 60), min_size=0, max_size=40)
PIPELINES = st.sampled_from([Pipeline(), Pipeline(2), Pipeline(4), Pipeline(2, 2)])
CHECKED = settings(max_examples=150, deadline=None, derandomize=True)


@CHECKED
@given(
    lengths=LENGTHS,
    dp=st.integers(1, 5),
    max_tokens=st.integers(60, 200),
    multiple=st.integers(1, 3),
    alignment=st.builds(Alignment, cp=st.sampled_from([1, 2, 3]), total=st.sampled_from([1, 2, 3])),
    longest=st.booleans(),
    pipeline=PIPELINES,
)
def test_plan_keeps_its_contract(
    lengths: list[int],
    dp: int,
    max_tokens: int,
    multiple: int,
    alignment: Alignment,
    longest: bool,
    pipeline: Pipeline,
) -> None:
    """Every sequence once; equally many microbatches, a multiple of what is asked; never over the token limit."""
    plan = plan_microbatches(lengths, dp, max_tokens, alignment, multiple, longest, pipeline)
    assert sorted(i for rank in plan for m in rank for i in m) == list(range(len(lengths)))
    counts = {len(rank) for rank in plan}
    assert len(plan) == dp and len(counts) == 1 and counts.pop() % multiple == 0
    for microbatch in itertools.chain(*plan):
        if len(microbatch) > 1:
            assert sum(alignment.padded([lengths[i] for i in microbatch])) <= max_tokens


@CHECKED
@given(lengths=LENGTHS, dp=st.integers(1, 4), order=st.randoms(use_true_random=False), pipeline=PIPELINES)
def test_plan_depends_on_lengths_alone(lengths: list[int], dp: int, order: object, pipeline: Pipeline) -> None:
    """The same lengths are together in the same microbatches when the order changes and ties are broken otherwise."""
    places = list(range(len(lengths)))
    order.shuffle(places)  # type: ignore[attr-defined]
    shuffled = [lengths[i] for i in places]
    a, b = (plan_microbatches(x, dp, 100, Alignment(), pipeline=pipeline) for x in (lengths, shuffled))
    assert [[sorted(lengths[i] for i in m) for m in r] for r in a] == [[sorted(shuffled[i] for i in m) for m in r] for r in b]


def times(plan: Plan, lengths: list[int], pipeline: Pipeline) -> np.ndarray:
    costs = sequence_costs(lengths)
    return pipeline.makespans(np.array([[sum(costs[i] for i in m) for m in rank] for rank in plan]))


@CHECKED
@given(lengths=st.lists(st.integers(1, 32768), min_size=1, max_size=60), dp=st.integers(1, 5))
def test_ranks_are_balanced(lengths: list[int], dp: int) -> None:
    """The slowest rank is at most one sequence, less its share of a rank, above the mean, without a pipeline (Graham 1969)."""
    found = times(plan_microbatches(lengths, dp, 32768, Alignment()), lengths, Pipeline())
    longest = max(sequence_costs(lengths))
    assert found.max() <= (found.mean() + longest * (1 - 1 / dp)) * (1 + 1e-12)


@CHECKED
@given(
    lengths=st.lists(st.integers(1, 32768), min_size=1, max_size=60),
    dp=st.integers(1, 5),
    pipeline=st.sampled_from([Pipeline(2), Pipeline(4), Pipeline(2, 2)]),
)
def test_never_much_slower_than_longest_first(lengths: list[int], dp: int, pipeline: Pipeline) -> None:
    """The plan is slower by a quarter at most in the cost model, with few sequences; usually it is faster."""
    found = times(plan_microbatches(lengths, dp, 32768, Alignment(), pipeline=pipeline), lengths, pipeline)
    plain = times(longest_first(lengths, dp, pipeline.stages), lengths, pipeline)
    assert found.max() <= 1.25 * plain.max()


def test_two_stages_by_hand() -> None:
    """Costs 3, 6, 3 (forward 1, 2, 1). Stage 0: F1 to 1, F2 to 3, B1 to 6 (stage 1: F1 B1 1 to 4), F3 to 7, B2 after stage 1's
    F2 B2 (4 to 10) to 14, B3 after stage 1's F3 B3 (10 to 13) to 16."""
    assert one_forward_one_backward(np.array([[3.0, 6.0, 3.0]]), 2).tolist() == [16.0]


@pytest.mark.parametrize(("m", "p"), [(1, 1), (1, 4), (2, 4), (5, 2), (8, 4)])
def test_equal_microbatches_have_the_known_bubble(m: int, p: int) -> None:
    """m + p - 1 times the cost of one (arXiv 2104.04473)."""
    equal = np.full((1, m), 6.0)
    assert one_forward_one_backward(equal, p)[0] == pytest.approx(6.0 * (m + p - 1))
    assert Pipeline(p, 2).makespans(equal)[0] == pytest.approx(6.0 * (m + (p - 1) / 2))


@pytest.mark.parametrize(("m", "p"), [(8, 2), (16, 4)])
def test_order_and_taper_shorten_the_bubble(m: int, p: int) -> None:
    shape = np.array([tapered(m, p)])
    shape /= shape.sum()
    equal = np.full((1, m), 1 / m)
    zigzag = np.empty_like(shape)  # small, large, small, large
    zigzag[0, 0::2], zigzag[0, 1::2] = np.split(np.sort(shape[0]), 2)
    tapered_time, equal_time, zigzag_time = (one_forward_one_backward(x, p)[0] for x in (shape, equal, zigzag))
    assert tapered_time < 0.97 * equal_time and tapered_time < 0.97 * zigzag_time


def test_more_microbatches_only_where_they_pay() -> None:
    """Without a pipeline there are as few as hold the tokens; with one there are more, but at most one per sequence."""
    lengths = [4000] * 64

    def count(pipeline: Pipeline, lengths: list[int] = lengths) -> int:
        return len(plan_microbatches(lengths, 2, 32000, Alignment(), pipeline=pipeline)[0])

    assert count(Pipeline()) == 4
    assert 4 < count(Pipeline(2, 2)) < count(Pipeline(2)) < count(Pipeline(4)) <= 32
    assert count(Pipeline(4), [4000] * 6) == 3
    assert count(Pipeline(4), [10] * 64) == 1


def calls_of_a_plan(count: int, shared: bool) -> int:
    """Return how many functions a plan of `count` long sequences calls at dp 1, whether they are written in C or not."""
    drawn = np.random.default_rng(count).lognormal(math.log(6000), 0.7, count)
    lengths = [300 + int(min(n, 20000)) for n in drawn]
    groups = PrefixGroups.of([i // 16 for i in range(count)], [300] * count, 64, 64) if shared else None
    tapered.cache_clear()
    calls = 0

    def count_call(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        plan_microbatches(lengths, 1, 21504, Alignment(), pipeline=Pipeline(8), prefix_groups=groups)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(("counts", "shared"), [((256, 4096), False), ((64, 1024), True)])
def test_the_work_of_a_plan_grows_with_the_sequences(counts: tuple[int, int], shared: bool) -> None:
    """Sixteen times as many sequences take at most 16 ** 1.1 times as many calls."""
    few, many = (calls_of_a_plan(count, shared) for count in counts)
    assert math.log(many / few) / math.log(counts[1] / counts[0]) <= 1.1


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 30 tokens"):
        plan_microbatches([5, 30], 1, 20, Alignment())


def test_metrics_by_hand() -> None:
    """Two ranks of 40 and 20 tokens of padded length, one dummy token pair; without attention a token costs 1."""
    plan = [[[0, 1], []], [[2], []]]
    found = plan_metrics(plan, [19, 18, 19], Alignment(cp=2), Pipeline(2), attention_tokens=1e18)
    assert found["packing/padding_share"] == pytest.approx(1 - 56 / (20 + 20 + 20 + 4 + 4))
    assert found["packing/balance"] == pytest.approx((74 + 38) / 2 / 74)  # two stages, one microbatch: each takes turns
    assert found["packing/bubble_share"] == pytest.approx(0.5)
    assert found["packing/microbatches"] == 2
    assert set(found) <= set(KEYS)
    assert plan_metrics([[[]]], [], Alignment())["packing/balance"] == 1.0


def test_two_stages_keep_ninety_percent_busy() -> None:
    """512 lognormal lengths, DP16, PP2; the plans of others as they were published, for scale."""
    found = measure(16, 2, seeds=4)
    assert found["ours"]["train_worst"] >= TARGET and found["ours"]["forward"] >= TARGET
    assert max(found["slime"]["train"], found["longest first"]["train"]) < 0.85
    assert found["ours"]["microbatches"] <= 24


@pytest.mark.parametrize(
    ("lengths", "dp", "max_tokens", "there_is_one"),
    [
        ([5, 9, 3, 7], 1, 100, True),  # all in one microbatch: in two halves
        ([100, 9, 3, 7, 60, 50], 1, 100, True),  # one fills a microbatch: the others find other neighbours
        ([60, 60, 60], 1, 100, False),  # no two fit together
        ([60, 61, 62], 2, 100, False),  # nor here: other ranks are no other packing
        ([60], 2, 100, False),
        ([1, 1], 1, 100, True),
    ],
)
@pytest.mark.parametrize("pipeline", [Pipeline(), Pipeline(2)])
def test_another_plan_is_another_one_or_none(
    lengths: list[int], dp: int, max_tokens: int, there_is_one: bool, pipeline: Pipeline
) -> None:
    def plan(tokens: int, longest: bool) -> Plan:
        return plan_microbatches(lengths, dp, tokens, Alignment(), longest_first=longest, pipeline=pipeline)

    def packed(plan: Plan) -> set[frozenset[int]]:
        return {frozenset(m) for rank in plan for m in rank if m}

    other = another_plan(plan, lengths, dp, max_tokens)
    assert (other is not None) == there_is_one
    if other is not None:
        assert packed(other) != packed(plan(max_tokens, True))
        assert sorted(i for rank in other for m in rank for i in m) == list(range(len(lengths)))
        assert max(sum(lengths[i] for i in m) for rank in other for m in rank) <= max_tokens
