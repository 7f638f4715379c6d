"""Counted costs of the rollout data path stay within their bounds, with the engine client in front of eight fake servers."""

import pytest

from benchmarks.controller.answers import END
from benchmarks.controller.engine_rows import engine_of, make_prompts, rollout_config, sampled
from benchmarks.controller.fake_pool import BINARY, FakePool, PoolSpec
from tepo_megatron.types import SamplingParams

SERVERS, PROMPTS = 8, 64
CONCURRENCY = 2  # most requests at once on a server
JSON_BYTES_PER_TOKEN = 80.0
BINARY_BYTES_PER_TOKEN = 12.0
CONNECTIONS_AT_ONCE = CONCURRENCY + 1  # the one more is for health requests
CONNECTIONS_OPENED = 10  # by one server of eight, of 64 requests that keep theirs and of control requests that do not


@pytest.mark.parametrize(("answers", "most"), [("json", JSON_BYTES_PER_TOKEN), (BINARY, BINARY_BYTES_PER_TOKEN)])
def test_counts_of_a_small_load(answers: str, most: float) -> None:
    spec = PoolSpec(SERVERS, 800, 2000, least_seconds=0.02, most_seconds=0.02, format=answers)
    with FakePool(spec) as pool, engine_of(rollout_config(pool.urls, CONCURRENCY, 4, 2001)) as engine:
        sampling = SamplingParams(samples=4, max_tokens=2001, stop_token_ids=(END,))
        rollouts = sampled(engine, make_prompts(PROMPTS), sampling)
        counts = pool.counts()
    tokens = sum(r.response_length for r in rollouts)
    assert tokens > 200_000 and counts.requests == PROMPTS
    assert 8 < counts.answer_bytes / tokens <= most
    assert 0 < counts.at_once <= CONNECTIONS_AT_ONCE
    assert 0 < counts.opened <= CONNECTIONS_OPENED
