"""Measure the engine client in front of fake servers: intake, and intake and grading in one process.

The engine, its HTTP client, its routing and its checks are those of a run.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.controller import Point, fastest
from benchmarks.controller.answers import END, FIRST_PIECE, VOCABULARY, write_tokenizer
from benchmarks.controller.fake_pool import FakePool, PoolSpec
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import RewardConfig, RolloutConfig, UrlServerConfig
from tepo_megatron.data import PromptStream
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.servers.endpoint import Endpoint
from tepo_megatron.engines.servers.fleet import Fleet
from tepo_megatron.engines.servers.rendezvous import KEY_VARIABLE
from tepo_megatron.engines.servers.server import NamedServer
from tepo_megatron.engines.vllm import VllmApi
from tepo_megatron.monitor.tracer import Clock
from tepo_megatron.rewards.build import build_reward
from tepo_megatron.rewards.terms import WeightedReward
from tepo_megatron.rollout.collector import Collector

SAMPLES, MEAN, CAP, PROMPT_TOKENS = 16, 6000, 20_000, 300  # of a step at cluster sizes
SERVERS, CONCURRENCY = 64, 64
CALLS, REPEATED_MILLIONS = 3, 20.0  # calls of which the fastest counts, up to this size; above it there is one call
ARRIVAL_SECONDS = 1.5  # in which the answers of a million tokens arrive
WORKERS = 2  # of the reward
CLOSE_SECONDS = 20.0  # of an engine; one that was interrupted in the middle of its work may hang


def make_prompts(count: int) -> list[Prompt]:
    """Return prompts with random token ids and a number as their answer."""
    draw = np.random.default_rng(1)
    return [
        Prompt(i, tuple(draw.integers(FIRST_PIECE, VOCABULARY, PROMPT_TOKENS).tolist()), str(draw.integers(1000)))
        for i in range(count)
    ]


def rollout_config(urls: Sequence[str], concurrency: int, samples: int, max_tokens: int, prompts: int = 1) -> RolloutConfig:
    """Return the rollout section of a run that uses the servers at these URLs."""
    return RolloutConfig(
        only=True,
        servers=len(urls),
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        max_response_tokens=max_tokens,
        filter_uniform_groups=False,
        server=UrlServerConfig(urls=list(urls), concurrency=concurrency),
    )


@contextmanager
def engine_of(cfg: RolloutConfig) -> Iterator[Fleet]:
    """Yield a running engine of the servers that the config names."""
    os.environ[KEY_VARIABLE] = "k" * 32
    assert isinstance(cfg.server, UrlServerConfig)
    launch = LaunchSpec(Path("none"), max_model_len=10**6, platform="cpu", precision="fp32", seed=0)
    servers = [NamedServer(f"server {i}", cfg.server, url) for i, url in enumerate(cfg.server.urls)]
    fleet = Fleet([Endpoint(server, VllmApi(), cfg.server, launch.max_model_len) for server in servers], cfg)
    try:
        fleet.start()
        fleet.wait_ready()
        yield fleet
    finally:
        closing = threading.Thread(target=fleet.close, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            print(f"the engine was not closed within {CLOSE_SECONDS:g} s", file=sys.stderr)


def sampled(engine: Fleet, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Rollout]:
    """Return all rollouts of the prompts, taken group by group as they arrive."""
    groups, rollouts = engine.open(), list[Rollout]()
    groups.add(prompts, sampling, seed=0)
    while (group := groups.next()) is not None:
        rollouts += group
    return rollouts


def _step(size: float, answer_format: str) -> tuple[list[Prompt], PoolSpec]:
    """Return the prompts of a step of this size, and its servers."""
    prompts = make_prompts(max(1, round(size * 1e6 / SAMPLES / MEAN)))
    return prompts, PoolSpec(SERVERS, MEAN, CAP, most_seconds=ARRIVAL_SECONDS * size, format=answer_format)


def _measured(size: float, work: Callable[[], Sequence[Rollout]]) -> Point:
    """Measure calls that return rollouts; the size of the point is that of their responses."""
    tokens: list[int] = []

    def counted_work() -> Sequence[Rollout]:
        rollouts = work()
        tokens.append(sum(r.token_ids_L.numel() - PROMPT_TOKENS for r in rollouts))
        return rollouts

    point = fastest(size, counted_work, CALLS if size <= REPEATED_MILLIONS else 1)
    return Point(tokens[-1] / 1e6, point.cpu_seconds)


def intake(sizes: Sequence[float], answer_format: str) -> list[Point]:
    """Measure receiving, decoding and checking the answers, without grading."""
    found, sampling = [], SamplingParams(samples=SAMPLES, max_tokens=CAP + 1, stop_token_ids=(END,))
    for size in sizes:
        prompts, spec = _step(size, answer_format)
        with FakePool(spec) as pool, engine_of(rollout_config(pool.urls, CONCURRENCY, SAMPLES, CAP + 1)) as engine:
            found.append(_measured(size, partial(sampled, engine, prompts, sampling)))
    return found


@contextmanager
def reward_of_run() -> Iterator[WeightedReward]:
    """Yield the default reward with a tokenizer of 60,000 entries, its workers started."""
    from tepo_megatron.data import decoder_file, load_tokenizer, text_functions

    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder, ExitStack() as stack:
        write_tokenizer(Path(folder))
        tokenizer = load_tokenizer(folder)
        file = stack.enter_context(decoder_file(tokenizer))
        yield stack.enter_context(build_reward(RewardConfig(workers=WORKERS), text_functions(tokenizer)[1], file))


def collect(sizes: Sequence[float], answer_format: str) -> list[Point]:
    """Measure the collector: intake and grading, as the process that collects does both."""

    def collected(collector: Collector) -> Sequence[Rollout]:
        return collector.collect(1, Clock())[0]

    found = []
    for size in sizes:
        prompts, spec = _step(size, answer_format)
        with FakePool(spec) as pool, reward_of_run() as reward:
            cfg = rollout_config(pool.urls, CONCURRENCY, SAMPLES, CAP + 1, len(prompts))
            with engine_of(cfg) as engine:
                stream = PromptStream(prompts, 0, shuffle=False)
                collector = Collector(cfg, engine, reward, stream, 0, (END,), max_generation_rounds=1, overlong=None)
                found.append(_measured(size, partial(collected, collector)))
    return found
