"""Shared prompts: computed once in a microbatch, seen by all their responses, planned within the limits, counted honestly."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.actor import build
from tepo_megatron.base.types import Rollout, TrainBatch
from tepo_megatron.config import ModelConfig, TrainingConfig
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.packing import PrefixGroups, pack, pieces_of
from tepo_megatron.ops.pipeline_time import Pipeline
from tepo_megatron.ops.planning import plan_microbatches

CHECKED = settings(max_examples=60, deadline=None, derandomize=True)
SHAPES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=9)  # (prompt, |y|)
PROMPT_TOKENS = (9, 1, 4, 17)


def batch_of(shapes: list[tuple[int, int]]) -> TrainBatch:
    """Sequences with these of four prompts; tokens at random."""
    generator = torch.Generator().manual_seed(len(shapes))
    prompts = [torch.randint(1, 1000, (n,), generator=generator) for n in PROMPT_TOKENS]
    rollouts = []
    for prompt, response in shapes:
        ids = torch.cat((prompts[prompt], torch.randint(1, 1000, (response,), generator=generator)))
        mask = torch.arange(ids.numel()) >= PROMPT_TOKENS[prompt]
        rollouts.append(Rollout(prompt, ids, mask, torch.zeros(ids.numel()), 0, "stop"))
    return TrainBatch.build(rollouts, torch.zeros(len(shapes)))


def prefix_groups_of(batch: TrainBatch, least_tokens: int = 1, least_saved: int = 0) -> PrefixGroups | None:
    return PrefixGroups.of(batch.prompt_ids, batch.prompt_lengths, least_tokens, least_saved)


@CHECKED
@given(shapes=SHAPES, cp=st.sampled_from([1, 2, 3]), total=st.sampled_from([1, 2]), seed=st.integers(0, 9))
def test_each_response_token_has_the_row_before_it(shapes: list[tuple[int, int]], cp: int, total: int, seed: int) -> None:
    """Rows are those without sharing; rows of a sequence are consecutive and in order, in ascending parts on one rank each."""
    batch, alignment = batch_of(shapes), Alignment(cp, total)
    ids, masks = ([getattr(r, name) for r in batch.rollouts] for name in ("token_ids_L", "response_mask_L"))
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    prefix_groups, found, owner = prefix_groups_of(batch), {}, {}
    for rank in range(cp):
        m = pack(ids, masks, batch.first_tokens, order, alignment, rank, prefix_groups=prefix_groups)
        assert m.tokens_S.numel() % total == 0 and m.tokens_S.numel() * cp == int(m.cu_seqlens[-1])
        assert sorted(m.sequences_G.tolist()) == sorted(order)
        keys = list(zip(m.sequence_R.tolist(), m.chunk_R.tolist(), m.position_R.tolist(), strict=True))
        assert keys == sorted(keys) and all(chunk < m.chunks for _, chunk, _ in keys)
        for row, label, (g, chunk, place), token in zip(m.rows_R, m.labels_R, keys, m.token_R.tolist(), strict=True):
            i = int(m.sequences_G[g])
            assert token == batch.first_tokens[i] + place and token not in found
            assert owner.setdefault((g, chunk), rank) == rank
            found[token] = int(label)
            assert m.tokens_S[0, row] == ids[i][batch.prompt_lengths[i] + place - 1]
    expected = torch.cat([x[m] for x, m in zip(ids, masks, strict=True)]).tolist()
    assert [found[k] for k in range(len(expected))] == expected


def test_what_is_not_worth_it_or_not_equal_is_not_shared() -> None:
    batch = batch_of([(0, 5), (0, 2), (1, 4), (1, 4), (3, 1)])
    assert prefix_groups_of(batch).group[:4] == (0, 0, 1, 1)
    assert len(set(prefix_groups_of(batch, least_tokens=2).group)) == 4  # a prompt of one token saves nothing under CP
    assert prefix_groups_of(batch, least_saved=9) is not None and prefix_groups_of(batch, least_saved=10) is None
    assert prefix_groups_of(batch.select([0, 2, 4], 0)) is None
    changed = batch.rollouts[1].token_ids_L.clone()
    changed[3] += 1
    other = Rollout(0, changed, batch.rollouts[1].response_mask_L, torch.zeros(11), 0, "stop")
    assert len(set(TrainBatch.build([batch.rollouts[0], other], torch.zeros(2)).prompt_ids)) == 2
    experts = [torch.zeros(r.token_ids_L.numel(), 1, 2, dtype=torch.int16) for r in batch.rollouts[:2]]
    experts[1][9:] = 1  # behind the prompt

    def prompt_ids() -> list[int]:
        rollouts = [
            Rollout(0, r.token_ids_L, r.response_mask_L, r.rollout_logprobs_L, 0, "stop", experts_LKT=e)
            for r, e in zip(batch.rollouts[:2], experts, strict=True)
        ]
        return TrainBatch.build(rollouts, torch.zeros(2)).prompt_ids

    assert prompt_ids() == [0, 0]
    experts[1][8] = 1
    assert prompt_ids() == [0, 1]


@CHECKED
@given(
    shapes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=2, max_size=30),
    dp=st.integers(1, 3),
    max_tokens=st.integers(40, 200),
    alignment=st.builds(Alignment, cp=st.sampled_from([1, 2]), total=st.sampled_from([1, 2])),
    pipeline=st.sampled_from([Pipeline(), Pipeline(2)]),
)
def test_plans_keep_their_contract(
    shapes: list[tuple[int, int]], dp: int, max_tokens: int, alignment: Alignment, pipeline: Pipeline
) -> None:
    """Every sequence once; no microbatch over the limit; never more tokens than without sharing in the same plan."""
    batch = batch_of(shapes)
    prefix_groups = prefix_groups_of(batch, alignment.sequence)
    plan = plan_microbatches(batch.lengths, dp, max_tokens, alignment, pipeline=pipeline, prefix_groups=prefix_groups)
    assert sorted(i for rank in plan for m in rank for i in m) == list(range(len(batch)))
    assert len({len(rank) for rank in plan}) == 1
    for m in itertools.chain(*plan):
        shared = sum(alignment.padded([p.tokens for p in pieces_of(m, batch.lengths, prefix_groups)] or [1]))
        assert shared <= sum(alignment.padded([batch.lengths[i] for i in m] or [1]))
        assert shared <= max_tokens or len(m) == 1


@pytest.mark.parametrize(
    ("share", "device", "shares"),
    [("auto", "cpu", True), ("never", "cpu", False), ("always", "cuda", True), ("auto", "cuda", False), ("auto", "te", False)],
)
def test_where_prompts_are_shared(monkeypatch: pytest.MonkeyPatch, share: Any, device: str, shares: bool) -> None:
    monkeypatch.setattr(build, "installed", lambda: frozenset({"transformer_engine"} if device == "te" else ()))
    where = torch.device("cpu" if device == "cpu" else "cuda")
    assert build.shares_prompts(TrainingConfig(share_prompts=share), ModelConfig(path="m"), where, 1) == shares
