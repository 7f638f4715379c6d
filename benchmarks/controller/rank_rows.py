"""Measure what ranks do with the rollouts of a step: how they arrive, and flat tensors, minibatches, packing.

The hand-over is measured at both ends, the sender and a receiver, over gloo on loopback:
python -m benchmarks.controller.rank_rows STORE SIZES     (the receiver, which the sender starts)
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.controller import Point, fastest
from benchmarks.controller.answers import END, FIRST_PIECE, VOCABULARY, boxed, lengths
from benchmarks.controller.engine_rows import CAP, MEAN, PROMPT_TOKENS, SAMPLES
from benchmarks.results import ROOT
from tepo_megatron.base.types import Rollout, TokenStats, TrainBatch
from tepo_megatron.dist.objects import broadcast_object
from tepo_megatron.losses.advantages import group_advantages
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.packing import pack
from tepo_megatron.service.batch_memory import BatchMemory
from tepo_megatron.trainer.batch_receiver import read

SECONDS = 300.0  # limit of each collective, and of the receiver's end
MICROBATCH = 32_768  # tokens
PACK_DP = 8  # the data-parallel ranks of which one packs


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


def select_and_pack(sizes: Sequence[float]) -> list[Point]:
    """Measure what each rank does with the batch: flat tensors, minibatches of two epochs, packing one of PACK_DP shares."""
    found = []
    _select_and_pack(make_rollouts(0.0))  # the first call of an operator takes longer
    for size in sizes:
        rollouts = make_rollouts(size)
        millions = sum(r.token_ids_L.numel() - PROMPT_TOKENS for r in rollouts) / 1e6
        found.append(fastest(millions, partial(_select_and_pack, rollouts)))
    return found


def _select_and_pack(rollouts: list[Rollout]) -> list[Any]:
    batch, alignment = TrainBatch.build(rollouts, group_advantages(rollouts, "std")), Alignment()
    old_N = torch.zeros(batch.num_tokens)
    batch = batch.with_old_stats(TokenStats(old_N, old_N.clone()))
    kept: list[Any] = [batch.lengths, batch.prompt_lengths, batch.rollout_logprobs_N]
    for part in batch.epochs(2, max(1, len(rollouts) // SAMPLES // 4), 0):
        kept = [part.lengths, part.response_lengths, part.rollout_logprobs_N]
    ids, masks = [r.token_ids_L for r in rollouts], [r.response_mask_L for r in rollouts]
    order = sorted(range(len(rollouts)), key=batch.lengths.__getitem__)[::PACK_DP]
    for indices in _filled(order, batch.lengths):
        kept.append(pack(ids, masks, batch.first_tokens, indices, alignment, 0))
    return kept


def _filled(order: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Return the sequences in microbatches of at most MICROBATCH tokens; benchmarks/packing.py measures planning."""
    found, used = [[order[0]]], sizes[order[0]]
    for i in order[1:]:
        if used + sizes[i] > MICROBATCH:
            found.append([])
            used = 0
        found[-1].append(i)
        used += sizes[i]
    return found


def send(rollouts: Sequence[Rollout], group: dist.ProcessGroup) -> None:
    """Hand the rollouts to the other rank of the group, as the rollout service does: a file in memory, and its header."""
    memory = BatchMemory()
    header = memory.write(rollouts, {}, {})
    broadcast_object(header, group)
    dist.barrier(group)
    memory.release(header.path)


def receive(group: dist.ProcessGroup) -> list[Rollout]:
    """Return the rollouts that rank 0 sent."""
    header = broadcast_object(None, group)
    assert header is not None
    rollouts = read(header, header.path, header.experts_path)
    dist.barrier(group)
    return rollouts


def hand_over(sizes: Sequence[float]) -> dict[str, list[Point]]:
    """Measure one step's hand-over at each size. Returns the points of the sender and of the receiver."""
    with tempfile.TemporaryDirectory(prefix="hand-over-") as folder:
        store = Path(folder) / "store"
        command = [sys.executable, "-m", "benchmarks.controller.rank_rows", str(store), json.dumps(list(sizes))]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as other:
            try:
                group = _join(store, 0)
                sent = []
                for size in sizes:
                    rollouts = make_rollouts(size)
                    dist.barrier(group)
                    sent.append(fastest(size, partial(send, rollouts, group)))
                out, _ = other.communicate(timeout=SECONDS)
            except BaseException:
                other.kill()
                raise
        dist.destroy_process_group()
    return {"sender": sent, "receiver": [Point(*point) for point in json.loads(out)]}


def _join(store: Path, rank: int) -> dist.ProcessGroup:
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    return group


def _main(store: Path, sizes: Sequence[float]) -> None:
    group, found = _join(store, 1), []
    for size in sizes:
        dist.barrier(group)
        point = fastest(size, lambda: receive(group))
        found.append((point.size, point.cpu_seconds))
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]))
