"""Plans of microbatches: every sequence once, within the limits, the same everywhere, and little time lost."""

import itertools
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.packing import PrefixGroups
from tepo_megatron.ops.pipeline_time import Pipeline, tapered
from tepo_megatron.ops.planning import Plan, plan_microbatches, sequence_costs

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
    lengths: list[int], dp: int, max_tokens: int, multiple: int, alignment: Alignment, longest: bool, pipeline: Pipeline
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


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "shared"), [((256, 4096), False), ((64, 1024), True)])
def test_the_work_of_a_plan_grows_with_the_sequences(counts: tuple[int, int], shared: bool) -> None:
    """Sixteen times as many sequences take at most 16 ** 1.1 times as many calls."""
    few, many = (calls_of_a_plan(count, shared) for count in counts)
    assert math.log(many / few) / math.log(counts[1] / counts[0]) <= 1.1


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 30 tokens"):
        plan_microbatches([5, 30], 1, 20, Alignment())
