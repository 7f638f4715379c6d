"""The committed figures, and counted costs of the rollout data path: no better than the code gives when measured again."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import packing, token_stats
from benchmarks.controller.answers import END
from benchmarks.controller.engine_rows import engine_of, make_prompts, rollout_config, sampled
from benchmarks.controller.fake_pool import BINARY, FakePool, PoolSpec
from benchmarks.results import OURS, ROWS, Measure, Object, SuiteOptions, load
from tepo_megatron.base.types import SamplingParams

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results/cpu.json"
COMMITTED = load(RESULTS)
ROUNDING = 1e-6  # relative: sums in another order


def worse(new: Object, old: Object) -> bool:
    slack = ROUNDING * abs(old["ours"])
    return new["ours"] < old["ours"] - slack if old["higher_is_better"] else new["ours"] > old["ours"] + slack


def check(measured: list[Measure], rows: set[int]) -> None:
    """Assert that all rows are measured again, none is worse than the committed one, and targets are met."""
    fresh = {x["id"]: x for x in (m.as_object() for m in measured) if x["deterministic"]}
    committed = {x["id"]: x for x in COMMITTED if x["deterministic"] and x["row"] in rows}
    assert fresh.keys() == committed.keys() and committed
    assert [(i, x["ours"], committed[i]["ours"]) for i, x in fresh.items() if worse(x, committed[i])] == []
    assert [(i, x["ours"], x["target"]) for i, x in fresh.items() if x["met"] is False] == []


@pytest.mark.slow
def test_memory_and_bytes_moved_are_no_worse_than_committed() -> None:
    assert torch.get_num_threads() == 1
    check(token_stats.gates(), {1})


def test_packing_and_padding_are_no_worse_than_committed() -> None:
    check(packing.measures(SuiteOptions(), planners=[OURS]), {6})


@pytest.mark.full
def test_collectives_are_no_worse_than_committed() -> None:
    check(token_stats.collectives(), {4})


@pytest.mark.full
def test_every_suite_of_the_command_runs(tmp_path: Path) -> None:
    """At a small size, without peers, every row is there, and all are measured except two runs of the demo."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    objects = load(out)
    assert {x["row"] for x in objects} == set(ROWS)
    assert {x["row"] for x in objects if x["ours"] is None} == {13}


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
