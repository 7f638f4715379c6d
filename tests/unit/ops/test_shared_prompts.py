"""Shared prompts: computed once in a microbatch, seen by all their responses, planned within the limits, counted honestly."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.actor import build
from tepo_megatron.config import ModelConfig, TrainingConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.packing import pack
from tepo_megatron.ops.pipeline_time import Pipeline
from tepo_megatron.ops.planning import plan_metrics, plan_microbatches
from tepo_megatron.ops.shared_prompts import PrefixGroups, SequencePiece, pieces_of, split_into_parts
from tepo_megatron.types import Rollout, TrainBatch

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


def test_pieces_by_hand() -> None:
    """Two prompts among three prefix_groups, one of them of one sequence; the prompt once, then what comes behind it."""
    batch = batch_of([(0, 5), (2, 3), (0, 2), (3, 6), (2, 0)])
    prefix_groups = prefix_groups_of(batch)
    assert pieces_of([0, 1, 2, 3, 4], batch.lengths, prefix_groups) == [
        SequencePiece(0, 0, 9), SequencePiece(0, 9, 14), SequencePiece(2, 9, 11),
        SequencePiece(1, 0, 4), SequencePiece(1, 4, 7), SequencePiece(4, 4, 4), SequencePiece(3, 0, 23),
    ]  # fmt: skip
    assert pieces_of([2, 1], batch.lengths, prefix_groups) == [SequencePiece(2, 0, 11), SequencePiece(1, 0, 7)]
    ids, masks = [r.token_ids_L for r in batch.rollouts], [r.response_mask_L for r in batch.rollouts]
    m = pack(ids, masks, batch.first_tokens, [0, 2, 3], Alignment(), 0, prefix_groups=prefix_groups)
    assert m.starts == (0, 9, 9, 0) and m.cu_seqlens.tolist() == [0, 9, 14, 16, 39] and m.max_seqlen == 23
    assert m.rows_R.tolist() == [8, 9, 10, 11, 12, 8, 14, *range(16 + 16, 16 + 22)]
    assert pack(ids, masks, batch.first_tokens, [2, 1], Alignment(), 0, prefix_groups=prefix_groups).starts is None


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


def test_a_family_is_kept_together_or_cut_where_that_is_faster() -> None:
    """16 responses of 1,000 tokens to 8,000: one microbatch if they fit, two if not, a part for each of four ranks."""
    lengths, prefix_groups = [9000] * 16, PrefixGroups((0,) * 16, (8000,) * 16)

    def plan(dp: int, max_tokens: int) -> list[list[int]]:
        return [
            [len(m) for m in rank]
            for rank in plan_microbatches(lengths, dp, max_tokens, Alignment(), prefix_groups=prefix_groups)
        ]

    assert plan(1, 24_000) == [[16]] and sorted(plan(1, 16_000)[0]) == [8, 8]
    assert plan(4, 24_000) == [[4]] * 4
    assert plan(1, 9_000) == [[1] * 16]
    ways = split_into_parts(prefix_groups, lengths, Alignment(), 32_000)
    assert [sorted(map(len, way)) for way in ways[:3]] == [[16], [8, 8], [1] * 16]


@pytest.mark.parametrize(
    ("share", "device", "shares"),
    [("auto", "cpu", True), ("never", "cpu", False), ("always", "cuda", True), ("auto", "cuda", False), ("auto", "te", False)],
)
def test_where_prompts_are_shared(monkeypatch: pytest.MonkeyPatch, share: Any, device: str, shares: bool) -> None:
    monkeypatch.setattr(build, "installed", lambda: frozenset({"transformer_engine"} if device == "te" else ()))
    where = torch.device("cpu" if device == "cpu" else "cuda")
    assert build.shares_prompts(TrainingConfig(share_prompts=share), ModelConfig(path="m"), where, 1) == shares


def test_sharing_on_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "installed", lambda: frozenset({"transformer_engine"}))
    with pytest.raises(ConfigError, match=r"model.attention=auto takes Transformer Engine.*set model.attention to sdpa"):
        build.shares_prompts(TrainingConfig(share_prompts="always"), ModelConfig(path="m"), torch.device("cuda"), 1)
    fp32 = ModelConfig(path="m", precision="fp32")  # under context parallelism `auto` takes PyTorch's layers for it
    assert build.shares_prompts(TrainingConfig(share_prompts="always"), fp32, torch.device("cuda"), 2)


def test_metrics_by_hand() -> None:
    """Two microbatches: a prompt of 9 with 3 + 5 behind it, padded to 12 + 4 + 8; and a sequence of 7, padded to 8."""
    prefix_groups = PrefixGroups((0, 0, 1), (9, 9, 4))
    found = plan_metrics([[[0, 1], [2]]], [12, 14, 7], Alignment(cp=2), attention_tokens=1e18, prefix_groups=prefix_groups)
    assert found["packing/computed_tokens"] == 12 + 4 + 8 + 8
    assert found["packing/shared_share"] == pytest.approx(9 / 33)
    assert found["packing/padding_share"] == pytest.approx(1 - 24 / 32)
    plain = plan_metrics([[[0, 1], [2]]], [12, 14, 7], Alignment(cp=2), attention_tokens=1e18)
    assert plain["packing/shared_share"] == 0 and plain["packing/computed_tokens"] == 12 + 16 + 8
