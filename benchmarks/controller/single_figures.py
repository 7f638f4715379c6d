"""Measure what is one number: the tail after the last token of a large group, and open files.

python -m benchmarks.controller.single_figures REQUESTS URL...   (sends this many requests at once)
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from benchmarks.controller.answers import END
from benchmarks.controller.engine_rows import (
    SAMPLES,
    TURN_CAP,
    TURN_MEAN,
    concurrent_requests,
    engine_of,
    make_prompts,
    reward_of_run,
    rollout_config,
    sampled,
)
from benchmarks.controller.fake_pool import FakePool, PoolSpec
from benchmarks.results import ROOT
from tepo_megatron.types import SamplingParams

SOFT_LIMIT = 1024
FILES_SECONDS = 60.0  # limit of the check of open files
TAIL_TOKENS = 20_000


def tail(answer_format: str) -> dict[str, float]:
    """Measure the seconds from a complete answer of SAMPLES x TAIL_TOKENS on the server to the graded group, and its tokens.

    The server has the answer ready: how long a real server takes to build it is not in here, nor is the hand-over to the ranks.
    """
    sampling = SamplingParams(samples=SAMPLES, max_tokens=TAIL_TOKENS, stop_token_ids=(END,))
    spec = PoolSpec(1, TAIL_TOKENS * 4, TAIL_TOKENS, answers=SAMPLES, format=answer_format)
    with (
        FakePool(spec) as pool,
        reward_of_run() as reward,
        engine_of(rollout_config(pool.urls, 1, SAMPLES, TAIL_TOKENS)) as engine,
    ):
        prompts = make_prompts(3)
        reward.score(sampled(engine, prompts[:1], sampling))
        start = time.monotonic()
        rollouts = sampled(engine, prompts[1:2], sampling)
        arrived = time.monotonic()
        reward.score(rollouts)
        end = time.monotonic()
    tokens = sum(rollout.response_length for rollout in rollouts)
    return {"tokens": tokens, "intake": arrived - start, "grading": end - arrived, "tail": end - start}


def open_files(requests: int, servers: int, hard: int | None) -> dict[str, Any]:
    """Send concurrent requests from a process that may open few files.

    Args:
        hard: Hard limit of open files. None: as it is. The soft limit is SOFT_LIMIT.
    Returns:
        Whether that ran, the last line of its errors, and the most connections that a server had open at once.
    """
    # the shell sets the limit, because Python's `preexec_fn` may not be used where there are threads
    script = f'ulimit -S -n {SOFT_LIMIT}; {"" if hard is None else f"ulimit -H -n {hard}; "}exec "$@"'
    spec = PoolSpec(servers, TURN_MEAN, TURN_CAP, least_seconds=6.0, most_seconds=8.0)
    with FakePool(spec) as pool:
        command = [sys.executable, "-m", "benchmarks.controller.single_figures", str(requests), *pool.urls]
        try:
            done = subprocess.run(
                ["bash", "-c", script, "bash", *command], cwd=ROOT, capture_output=True, text=True, timeout=FILES_SECONDS
            )
            error = (done.stderr.strip().splitlines() or ["no error"])[-1][:300] if done.returncode else ""
        except subprocess.TimeoutExpired:
            error = f"not done after {FILES_SECONDS:g} s"
        return {"runs": not error, "error": error, "at once": pool.counts().at_once}


if __name__ == "__main__":
    concurrent_requests(int(sys.argv[1]), sys.argv[2:])
