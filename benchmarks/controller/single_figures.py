"""Measure what is one number: the slow-down of a rank while tokens arrive, the tail after the last token, and open files.

python -m benchmarks.controller.single_figures CORE SECONDS URL...   (takes in tokens on a core, next to a rank)
python -m benchmarks.controller.single_figures open-files REQUESTS URL...
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.controller.answers import END
from benchmarks.controller.engine_rows import (
    CAP,
    CONCURRENCY,
    MEAN,
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

LAYERS, WIDTH, BATCH = 40, 64, 32  # of the network whose operators are small
INTAKE_SERVERS, INTAKE_PROMPTS = 4, 4  # of a round of the load
WARM_UP_SECONDS, RATE_SECONDS, ROUNDS = 2.5, 3.0, 3
SOFT_LIMIT = 1024
FILES_SECONDS = 60.0  # limit of the check of open files
TAIL_TOKENS = 20_000


class PythonBackward(torch.autograd.Function):
    """The identity, whose backward is written in Python: Megatron has many of these, and each takes the interpreter's lock."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x."""
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient."""
        return grads[0] * 1.0


def make_rank_step() -> Callable[[], None]:
    """Return a forward and backward pass of many small operators, as Megatron's Python launches them."""
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        h = x
        for layer in layers:
            h = PythonBackward.apply(torch.nn.functional.gelu(layer(h))) + h
        h.sum().backward()
        for layer in layers:
            layer.zero_grad()

    return step


def steps_per_second(step: Callable[[], None], seconds: float) -> float:
    """Return how often the calling thread runs `step` in a second.

    Args:
        step: See `make_rank_step`.
        seconds: Time to measure.
    """
    start, count = time.monotonic(), 0
    while (passed := time.monotonic() - start) < seconds:
        step()
        count += 1
    return count / passed


def take_in(urls: Sequence[str], core: int, over: threading.Event) -> None:
    """Take in tokens again and again on one core, until `over` is set.

    The threads that the engine starts inherit the core of the calling thread.

    Args:
        urls: Base URLs of fake servers.
        core: The core.
        over: Ends the work after the round.
    """
    os.sched_setaffinity(0, {core})  # of this thread
    sampling = SamplingParams(samples=SAMPLES, max_tokens=CAP + 1, stop_token_ids=(END,))
    with engine_of(rollout_config(urls, CONCURRENCY, SAMPLES, CAP + 1)) as engine:
        prompts = make_prompts(INTAKE_PROMPTS)
        while not over.is_set():
            sampled(engine, prompts, sampling)


def slow_down() -> dict[str, float]:
    """Measure a rank on one core while the fake servers and the intake are on another one.

    Returns:
        Steps per second alone, with the intake in a process of its own ("the same load without intake"), and with the intake
        where the package has it: today a thread of the rank's process; and the slow-down, the quotient of the last two.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    torch.set_num_threads(1)
    step, rates = make_rank_step(), dict[str, list[float]]()
    spec = PoolSpec(INTAKE_SERVERS, MEAN, CAP, core=cores[-1])
    with FakePool(spec) as pool:
        os.sched_setaffinity(0, {cores[0]})
        for _ in range(ROUNDS):
            steps_per_second(step, 0.5)
            rates.setdefault("alone", []).append(steps_per_second(step, RATE_SECONDS / 2))
            with _elsewhere(pool.urls, cores[-1]) as process:
                time.sleep(2 * WARM_UP_SECONDS)
                rates.setdefault("intake in a process", []).append(steps_per_second(step, RATE_SECONDS))
                assert process.poll() is None, "the intake ended before the measurement"
                process.kill()
            over = threading.Event()
            thread = threading.Thread(target=take_in, args=(pool.urls, cores[-1], over))
            thread.start()
            time.sleep(WARM_UP_SECONDS)
            rates.setdefault("intake as it is", []).append(steps_per_second(step, RATE_SECONDS))
            over.set()
            thread.join()
        os.sched_setaffinity(0, set(cores))
    median = {name: sorted(found)[len(found) // 2] for name, found in rates.items()}
    return median | {"slow-down": median["intake in a process"] / median["intake as it is"]}


def _elsewhere(urls: Sequence[str], core: int) -> subprocess.Popen[bytes]:
    """Start a process that takes in tokens on a core."""
    command = [sys.executable, "-m", "benchmarks.controller.single_figures", str(core), str(60.0), *urls]
    return subprocess.Popen(command, cwd=ROOT)


def tail() -> dict[str, float]:
    """Measure the seconds from a complete answer of SAMPLES x TAIL_TOKENS on the server to the graded group, and its tokens.

    The server has the answer ready: how long a real server takes to build it is not in here, nor is the hand-over to the ranks.
    """
    sampling = SamplingParams(samples=SAMPLES, max_tokens=TAIL_TOKENS, stop_token_ids=(END,))
    spec = PoolSpec(1, TAIL_TOKENS * 4, TAIL_TOKENS, answers=SAMPLES)
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
        requests: Requests at once.
        servers: Number of servers.
        hard: Hard limit of open files. None: as it is. The soft limit is SOFT_LIMIT.

    Returns:
        Whether that ran, the last line of its errors, and the most connections that a server had open at once.
    """
    # the shell sets the limit, because Python's `preexec_fn` may not be used where there are threads
    script = f'ulimit -S -n {SOFT_LIMIT}; {"" if hard is None else f"ulimit -H -n {hard}; "}exec "$@"'
    spec = PoolSpec(servers, TURN_MEAN, TURN_CAP, least_seconds=6.0, most_seconds=8.0)
    with FakePool(spec) as pool:
        command = [sys.executable, "-m", "benchmarks.controller.single_figures", "open-files", str(requests), *pool.urls]
        try:
            done = subprocess.run(
                ["bash", "-c", script, "bash", *command], cwd=ROOT, capture_output=True, text=True, timeout=FILES_SECONDS
            )
            error = (done.stderr.strip().splitlines() or ["no error"])[-1][:300] if done.returncode else ""
        except subprocess.TimeoutExpired:
            error = f"not done after {FILES_SECONDS:g} s"
        return {"runs": not error, "error": error, "at once": pool.counts().at_once}


def _main(words: Sequence[str]) -> None:
    if words[0] == "open-files":
        concurrent_requests(int(words[1]), words[2:])
        return
    over = threading.Event()
    threading.Timer(float(words[1]), over.set).start()
    torch.set_num_threads(1)
    take_in(words[2:], int(words[0]), over)


if __name__ == "__main__":
    _main(sys.argv[1:])
