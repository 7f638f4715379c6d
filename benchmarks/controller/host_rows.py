"""Measure what the host does with the rollouts of a step: grade, record, select, pack, hash, plan, take prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.controller.answers import END, FIRST_PIECE, VOCABULARY, boxed, lengths
from benchmarks.controller.engine_rows import CAP, MEAN, PROMPT_TOKENS, SAMPLES, reward_of_run
from benchmarks.controller.measuring import Point, fastest, repeated
from tepo_megatron.data import PromptStream
from tepo_megatron.losses.advantages import group_advantages
from tepo_megatron.observability.metrics import Metrics
from tepo_megatron.ops import balance, pipeline_time, planning, shared_prompts
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.packing import pack
from tepo_megatron.ops.pipeline_time import Pipeline
from tepo_megatron.ops.shared_prompts import PrefixGroups
from tepo_megatron.rewards.terms import WeightedReward
from tepo_megatron.rollout import record
from tepo_megatron.types import Prompt, Rollout, TokenStats, TrainBatch
from tepo_megatron.utils.seeding import hash_rows

MICROBATCH = 32_768  # tokens
PACK_DP = 8  # the data-parallel ranks of which one packs
PLAN_MEAN, PLAN_TOKENS = 8000, 21_504  # mean tokens of a planned sequence, and most tokens of a microbatch
DATASET, SMALL_DATASET = 1_000_000, 100_000  # prompts
RETURNED_OF_12M = 512  # prompts that are returned to the stream; they grow with the step


def make_rollouts(size: float) -> list[Rollout]:
    """Return graded rollouts of groups of SAMPLES, with a boxed number at the end of each response."""
    draw = np.random.default_rng(0)
    found = []
    for place, number in enumerate(lengths(max(SAMPLES, round(size * 1e6 / MEAN)), MEAN, CAP, draw).tolist()):
        tail = [*boxed(7), END][-number:]
        ids = draw.integers(FIRST_PIECE, VOCABULARY, PROMPT_TOKENS + number)
        ids[-len(tail) :] = tail
        mask_L = torch.arange(len(ids)) >= PROMPT_TOKENS
        logprobs_L = torch.from_numpy(-draw.random(len(ids), dtype=np.float32)) * mask_L
        score = float(draw.integers(2))
        found.append(
            Rollout(place // SAMPLES, torch.from_numpy(ids), mask_L, logprobs_L, 0, "stop", "7", score, score, "exact")
        )
    return found


def tokens_of(rollouts: Sequence[Rollout]) -> float:
    """Return the response tokens in millions."""
    return sum(r.token_ids_L.numel() - PROMPT_TOKENS for r in rollouts) / 1e6


def grading(sizes: Sequence[float]) -> list[Point]:
    """Measure grading in the process that collects: decoding and the last box. Workers are other processes."""
    found = []
    with reward_of_run() as reward:
        for size in sizes:
            rollouts = make_rollouts(size)
            reward.score(rollouts[:1])
            groups = [rollouts[i : i + SAMPLES] for i in range(0, len(rollouts), SAMPLES)]
            found.append(fastest(tokens_of(rollouts), partial(_score, reward, groups)))
    return found


def _score(reward: WeightedReward, groups: Sequence[list[Rollout]]) -> list[list[Rollout]]:
    return [reward.score(group) for group in groups]


def recording(sizes: Sequence[float]) -> dict[str, list[Point]]:
    """Measure writing a step's rollouts, and reading them again for a replay."""
    found: dict[str, list[Point]] = {"write": [], "read": []}
    record_once = partial(record.write, step=1, metrics=Metrics())
    for size in [0.0, *sizes]:
        rollouts = make_rollouts(size)
        with tempfile.TemporaryDirectory(prefix="record-") as name:
            folder = Path(name)
            found["write"].append(fastest(tokens_of(rollouts), partial(record_once, folder, rollouts=rollouts)))
            found["read"].append(fastest(tokens_of(rollouts), partial(record.read, folder, 1)))
    return {name: points[1:] for name, points in found.items()}  # without the first, which warms up


def batch_of(rollouts: Sequence[Rollout]) -> TrainBatch:
    """Return the training batch of rollouts, with old log-probs and entropies."""
    batch = TrainBatch.build(rollouts, group_advantages(rollouts, "std"))
    old_N = torch.zeros(batch.num_tokens)
    return batch.with_old_stats(TokenStats(old_N, old_N.clone()))


def select_and_pack(sizes: Sequence[float]) -> list[Point]:
    """Measure what each rank does with the batch: flat tensors, minibatches of two epochs, packing one of PACK_DP shares."""

    def work(rollouts: list[Rollout]) -> list[Any]:
        batch, alignment = batch_of(rollouts), Alignment()
        kept: list[Any] = [batch.lengths, batch.prompt_lengths, batch.rollout_logprobs_N]
        for part in batch.epochs(2, max(1, len(rollouts) // SAMPLES // 4), 0):
            kept = [part.lengths, part.response_lengths, part.rollout_logprobs_N]
        ids, masks = [r.token_ids_L for r in rollouts], [r.response_mask_L for r in rollouts]
        order = sorted(range(len(rollouts)), key=batch.lengths.__getitem__)[::PACK_DP]
        for indices in _filled(order, batch.lengths):
            kept.append(pack(ids, masks, batch.first_tokens, indices, alignment, 0))
        return kept

    return _on_rollouts(sizes, work)


def _filled(order: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Return the sequences in microbatches of at most MICROBATCH tokens; planning is measured elsewhere."""
    found, used = [[order[0]]], sizes[order[0]]
    for i in order[1:]:
        if used + sizes[i] > MICROBATCH:
            found.append([])
            used = 0
        found[-1].append(i)
        used += sizes[i]
    return found


def weighting(sizes: Sequence[float]) -> list[Point]:
    """Measure the random keys of all tokens, which weighting objectives draw once per optimizer step."""
    return _on_rollouts(sizes, lambda batch: hash_rows(1, batch.token_keys_N(torch.device("cpu"))), batch_of)


def _on_rollouts(
    sizes: Sequence[float], work: Callable[[Any], Any], before: Callable[[list[Rollout]], Any] = lambda rollouts: rollouts
) -> list[Point]:
    found = []
    work(before(make_rollouts(0.0)))  # the first call of an operator takes longer
    for size in sizes:
        rollouts = make_rollouts(size)
        given = before(rollouts)
        found.append(fastest(tokens_of(rollouts), partial(work, given)))
    return found


def plan(sizes: Sequence[float], dp: int, shared: bool = False) -> list[Point]:
    """Measure the plan of sequences of 8,300 tokens on average, with empty caches.

    Args:
        shared: Groups of SAMPLES share their prompt, at pp 4. False: no prompt is shared, pp 8.
    """

    def cold() -> None:
        for cached in (
            value for module in (balance, pipeline_time, planning, shared_prompts) for value in vars(module).values()
        ):
            if callable(clear := getattr(cached, "cache_clear", None)):
                clear()

    found = []
    for size in sizes:
        count = max(SAMPLES, round(size * 1e6 / PLAN_MEAN))
        tokens = (lengths(count, PLAN_MEAN, CAP, np.random.default_rng(0)) + PROMPT_TOKENS).tolist()
        groups = PrefixGroups(tuple(i // SAMPLES for i in range(count)), (PROMPT_TOKENS,) * count) if shared else None
        pipeline = Pipeline(4 if shared else 8)
        work = partial(
            planning.plan_microbatches, tokens, dp, PLAN_TOKENS, Alignment(), pipeline=pipeline, prefix_groups=groups
        )
        found.append(repeated(size, work, cold))
    return found


def take(sizes: Sequence[float], dataset: int) -> list[Point]:
    """Measure taking prompts that were returned to the stream. The returned prompts grow with the step."""
    found, ids = [], (1, 2, 3)
    stream = PromptStream([Prompt(i, ids, "7") for i in range(dataset)], 0, shuffle=True)
    for size in sizes:
        count = max(1, round(RETURNED_OF_12M * size / 12))
        returned = stream.take(count)
        found.append(repeated(size, partial(stream.take, count), partial(stream.give_back, returned)))
    return found
