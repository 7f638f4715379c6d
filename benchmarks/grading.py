"""Measure the time of grading, and how often it is right.

    python -m benchmarks.grading [--workers 2] [--quick] [--json FILE]

Throughput: 512 distinct pairs of (gold, answer) of one kind, all equal except for their notation; median of five batches of new
pairs on warm workers, including the decoding of token ids; then the same batch again, whose comparisons are remembered by now.
math-verify alone: the same pairs, one after the other, in one process without limits. Generation: how late an event loop in
another thread, such as the one that talks to the inference servers, is woken meanwhile (it asks every 5 ms; the worst case
counts).

Agreement: tests/grading_pairs.py, with the labels, ours and math-verify's own. Hostile: tests/hostile_answers.py one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RewardConfig
from tepo_megatron.rewards import build_reward
from tepo_megatron.rewards.terms import WeightedReward
from tepo_megatron.types import Rollout
from tepo_megatron.utils.loop import LoopThread
from tests.grading_pairs import load_pairs
from tests.hostile_answers import hostile_answers

PAIRS = 512
TICK_SECONDS = 0.005
KINDS: dict[str, Callable[[int], tuple[str, str]]] = {
    "integers, as they stand": lambda i: (str(i), f"{i}"),
    "integers, written otherwise": lambda i: (str(i), f"+{i:,}"),
    "integers, by math-verify": lambda i: (str(i), f"{i}.0"),
    "fractions": lambda i: (rf"\frac{{{i}}}{{{i + 1}}}", rf"\frac{{{2 * i}}}{{{2 * i + 2}}}"),
    "intervals": lambda i: (f"[{i},{i + 1})", rf"{i} \le x < {i + 1}"),
    "roots": lambda i: (rf"{i}\sqrt{{2}}", rf"\sqrt{{{2 * i * i}}}"),
}
HOSTILE_GOLD = "8"  # no hostile answer means it; an equation counts by its right-hand side


def decode(ids: Sequence[int]) -> str:
    """Return the text of tokens that are code points."""
    return "".join(map(chr, ids))


def response(answer: str, gold: str) -> Rollout:
    """Return a rollout whose tokens are code points."""
    ids_L = torch.tensor([63, *map(ord, rf"so \boxed{{{answer}}}")])
    return Rollout(0, ids_L, torch.arange(len(ids_L)) > 0, torch.zeros(len(ids_L)), 0, "stop", gold)


def reward_of(workers: int) -> WeightedReward:
    """Return the default reward with its workers warmed up."""
    reward = build_reward(RewardConfig(workers=workers), decode)
    reward.score([response(f"{2 * i}/2", f"{i}") for i in range(8 * workers)])
    return reward


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the wall-clock seconds of one call."""
    start = time.monotonic()
    work()
    return time.monotonic() - start


async def lateness(until: asyncio.Event) -> float:
    """Return the largest number of seconds by which a sleep took longer than it should."""
    worst = 0.0
    while not until.is_set():
        start = time.monotonic()
        await asyncio.sleep(TICK_SECONDS)
        worst = max(worst, time.monotonic() - start - TICK_SECONDS)
    return worst


def throughput(workers: int, pairs: int, batches: int) -> dict[str, dict[str, float]]:
    """Return, by kind, the seconds of a batch, of the same batch again, of math-verify alone, and the lateness of another loop.

    Args:
        workers: Number of grading processes.
        pairs: Pairs in a batch.
        batches: Number of batches.
    """
    found = {}
    for kind, make in KINDS.items():
        with reward_of(workers) as reward:
            loop, done = LoopThread("ticks"), asyncio.Event()
            ticks = loop.submit(lateness(done))
            times, again = [], []
            for batch in range(batches):
                made = [make(1000 + batch * pairs + i) for i in range(pairs)]
                rollouts = [response(answer, gold) for gold, answer in made]
                times.append(seconds_of(partial(reward.score, rollouts)))
                again.append(seconds_of(partial(reward.score, rollouts)))
                assert all(r.score == 1.0 for r in reward.score(rollouts)), kind
            done.set()
            late = ticks.result()
            loop.stop()
        alone = seconds_of(partial(list, starmap(plain, made)))
        found[kind] = {
            "seconds": statistics.median(times), "again": statistics.median(again), "late": late, "math_verify": alone
        }  # fmt: skip
    return found


def plain(gold: str, answer: str) -> bool:
    """Return whether math-verify, used as its readme shows, finds the answer correct."""
    from math_verify import parse, verify  # type: ignore[import-not-found,unused-ignore]

    gold_parsed, answer_parsed = parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{answer}}}")
    return bool(gold_parsed and answer_parsed and verify(gold_parsed, answer_parsed))


def agreement(workers: int) -> dict[str, dict[str, int]]:
    """Return, by kind, the number of pairs, and on how many of them we and math-verify agree with the label."""
    pairs = load_pairs()
    with reward_of(workers) as reward:
        ours = [r.score == 1.0 for r in reward.score([response(p.answer, p.gold) for p in pairs])]
    counts: dict[str, Counter[str]] = {}
    for pair, right in zip(pairs, ours, strict=True):
        count = counts.setdefault(pair.kind, Counter())
        count += Counter(pairs=1, ours=right == pair.right, math_verify=plain(pair.gold, pair.answer) == pair.right)
    return {kind: dict(count) for kind, count in counts.items()}


def hostile(every: int) -> dict[str, Any]:
    """Grade every `every`-th hostile answer on one worker; return statuses, and the longest and total time in seconds."""
    with reward_of(1) as reward:
        found, times = Counter[str](), []
        for answer in hostile_answers()[::every]:
            start = time.monotonic()
            (graded,) = reward.score([response(answer, HOSTILE_GOLD)])
            times.append(time.monotonic() - start)
            found[graded.status] += 1
            assert graded.score == 0.0, answer
    return {"answers": len(times), "worst": max(times), "all": sum(times), "statuses": dict(found)}


def main() -> None:
    """Measure throughput, agreement and hostile answers; print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few pairs, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    pairs, batches, every = (32, 1, 40) if args.quick else (PAIRS, 5, 1)
    load = os.getloadavg()[0]
    print(f"{args.workers} workers, {len(os.sched_getaffinity(0))} cores, load {load:.1f} before")
    speed = throughput(args.workers, pairs, batches)
    for kind, t in speed.items():
        print(
            f"{kind}: {pairs} in {t['seconds']:.3f} s, again {1000 * t['again']:.1f} ms, math-verify alone "
            f"{t['math_verify']:.2f} s, another thread woken at most {1000 * t['late']:.1f} ms late"
        )
    right = agreement(args.workers)
    for kind, c in right.items():
        print(f"{kind}: {c['pairs']} pairs, ours {c['ours']}, math-verify {c['math_verify']}")
    print("all: " + ", ".join(f"{name} {sum(c[name] for c in right.values())}" for name in ("pairs", "ours", "math_verify")))
    attack = hostile(every)
    print(f"hostile: {attack}")
    if args.json is not None:
        args.json.write_text(json.dumps({"load": load, "throughput": speed, "agreement": right, "hostile": attack}, indent=1))


if __name__ == "__main__":
    main()
