"""Count the collectives of tensor and context parallelism, and the rows that reach the output layer.

    python -m benchmarks.layouts [--peers DIR]

Real worlds of ranks over gloo, forked; for the objectives and the actor with the very code with which tests/parallel counts.
Collectives are those of one microbatch: of log-prob and entropy over tensor-parallel ranks, of a whole objective over
context-parallel ranks. Start it with OMP_NUM_THREADS=1: forks do not keep threads.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # verl would compile in each rank

import torch
import torch.distributed as dist

from benchmarks._measure import counted_collectives
from benchmarks._token_stats_peers import look_into, vocab_parallel
from benchmarks.results import OURS, Measure, Target, table
from tepo_megatron.types import Rollout, TrainBatch

ROWS, VOCAB = 64, 1000
ACTOR_LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {}, "TP2 with sequence parallelism": {"tp": 2, "sequence_parallel": True}, "CP2": {"cp": 2}, "DP2": {"dp": 2},
}  # fmt: skip
SEQUENCES = ((3, 14), (8, 1), (5, 25), (4, 9), (7, 30), (3, 1), (6, 17), (5, 2))  # (prompt tokens, response tokens)
WITH_CORRECTION = "tepo, mis"  # needs a sequence mean of its own


def tensor_parallel(rank: int, size: int) -> dict[str, tuple[int, int, int]]:
    """Return {name: (collectives in forward, in backward, rows that are not the same bits on all ranks)}; runs on every rank.

    Args:
        rank: This rank.
        size: Number of ranks.
    """
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
        everybodys = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(everybodys, mine)
        differing = torch.stack([(x != everybodys[0]).any(0) for x in everybodys]).any(0).sum()
        counted[name] = (forward, backward, int(differing))
    return counted


def context_parallel(rank: int) -> dict[str, tuple[bool, int, int]]:
    """Return {objective: (whether it declares a sum in backward, collectives in forward, in backward)}; runs on both ranks."""
    from tests.objective_cases import draw
    from tests.parallel import test_objective_layouts as laid

    dist.init_process_group("gloo")
    minibatch = laid.Laid(draw(0, laid.RESPONSES))
    packed = minibatch.microbatches(laid.LAYOUTS["CP2"], rank)
    out = {}
    for name, objective in laid.objectives().items():
        with counted_collectives() as calls:
            _, forward, _ = laid.backward(minibatch, objective, packed, dist.group.WORLD)
        declared = not objective.has_constant_factors or objective.ratio == "prefix"
        out[name] = (declared, forward.total(), calls.total() - forward.total())
    return out


def rollouts() -> TrainBatch:
    """Return a batch of sequences of random tokens."""
    generator = torch.Generator().manual_seed(0)
    made = [
        Rollout(
            prompt_id=i, token_ids_L=torch.randint(1, 64, (prompt + response,), generator=generator),
            response_mask_L=torch.arange(prompt + response) >= prompt, rollout_logprobs_L=torch.zeros(prompt + response),
            policy_version=0, stop_reason="stop",
        )
        for i, (prompt, response) in enumerate(SEQUENCES)
    ]  # fmt: skip
    return TrainBatch.build(made, torch.ones(len(made)))


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
            values = {name: counts[column] for name, counts in counted.items()}
            found.append(_count(4, f"log-prob + entropy, TP{size}, {what}", values, limit))
    counted = run_world(2, context_parallel, timeout=300.0)[0]
    alone = {name: row for name, row in counted.items() if "mis" not in name}
    for declared, what in ((False, "without"), (True, "that declare")):
        rows = [row for row in alone.values() if row[0] == declared]
        name = f"objectives {what} a sum in backward, CP2"
        for column, direction, limit in ((1, "forward", 1), (2, "backward", int(declared))):
            values = {OURS: max(row[column] for row in rows)}
            found.append(_count(4, f"{name}, {direction}, most", values, limit, {"objectives": len(rows)}))
    _, forward, backward = counted[WITH_CORRECTION]
    found.append(_count(4, f"{WITH_CORRECTION}, CP2, forward", {OURS: forward}, None))
    found.append(_count(4, f"{WITH_CORRECTION}, CP2, backward", {OURS: backward}, 0))
    return found + output_rows()


def output_rows() -> list[Measure]:
    """Count the rows beyond the response tokens that reach the output layer in a pass over a batch."""
    from tests.parallel.cases import run_config
    from tests.parallel.test_actor import old_stats
    from tests.tiny import tiny_qwen3
    from tests.worlds import run_world

    batch, found = rollouts(), []
    with tempfile.TemporaryDirectory() as folder:
        tiny_qwen3(Path(folder), layers=1)
        for name, layout in ACTOR_LAYOUTS.items():
            cfg = run_config(Path(folder), layout, max_tokens=60)
            ranks = run_world(cfg.parallel.world_size, old_stats, cfg, batch, timeout=300.0)
            rows = sum(sum(r["rows"]) for r in ranks if r["first_tp"])
            assert rows >= batch.num_tokens, f"{rows} rows were counted, there are {batch.num_tokens} response tokens"
            values = {OURS: rows - batch.num_tokens, "all tokens": sum(batch.lengths) - batch.num_tokens}
            found.append(_count(5, f"old statistics, {name}", values, 0))
    return found


def _count(
    row: int, name: str, values: dict[str, int], limit: int | None, more: Mapping[str, int] = MappingProxyType({})
) -> Measure:
    targets = () if limit is None else (Target(OURS, "<=", limit),)
    peers = {k: float(v) for k, v in values.items() if k != OURS}
    return Measure(row, name, "", float(values[OURS]), peers, targets, deterministic=True, more=more)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="a folder with installed peers")
    print(table(m.as_object() for m in measure(parser.parse_args().peers)))


if __name__ == "__main__":
    main()
