"""Count the collectives of log-prob and entropy over tensor-parallel ranks, ours and verl's.

    python -m benchmarks --only 4 [--peers DIR]

Real worlds of forked ranks over gloo, each with one thread, because forks do not keep threads. Those of whole objectives
over context-parallel ranks, and the rows that reach the output layer, are counted by tests/parallel.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._measure import counted_collectives
from benchmarks._token_stats_peers import look_into, vocab_parallel
from benchmarks.results import OURS, Measure, Target

ROWS, VOCAB = 64, 1000


def tensor_parallel(rank: int, size: int) -> dict[str, tuple[int, int, int]]:
    """Return {name: (collectives in forward, in backward, rows that are not the same bits on all ranks)} on every rank."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(ROWS, VOCAB, generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    counted = {}
    for name, statistics in vocab_parallel(size).items():
        logits = whole.chunk(size, dim=1)[rank].clone().requires_grad_() * 1
        with counted_collectives() as calls:
            logprob, entropy = statistics(logits, labels)
            forward = calls.total()
            (logprob.sum() + entropy.sum()).backward()
            backward = calls.total() - forward
        mine = torch.stack((logprob, entropy)).detach()
        of_ranks = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(of_ranks, mine)
        differing = torch.stack([(x != of_ranks[0]).any(0) for x in of_ranks]).any(0).sum()
        counted[name] = (forward, backward, int(differing))
    return counted


def measure(peers: Path | None = None) -> list[Measure]:
    """Return all counts, the same on every machine. Without peers only ours are counted."""
    from tepo_megatron.platform import activate

    activate("cpu")
    from tests.worlds import run_world

    look_into(peers)
    found = []
    for size in (2, 4):
        counted = run_world(size, tensor_parallel, size, timeout=300.0)[0]
        for column, (what, limit) in enumerate((("forward", 1), ("backward", 0), ("rows that differ between ranks", 0))):
            others = {name: float(counts[column]) for name, counts in counted.items() if name != OURS}
            name, targets = f"log-prob + entropy, TP{size}, {what}", (Target(OURS, "<=", limit),)
            found.append(Measure(4, name, "", float(counted[OURS][column]), others, targets, deterministic=True))
    return found
