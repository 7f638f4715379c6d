"""Counted costs of the rollout data path stay within their bounds, with the engine client in front of eight fake servers."""

from pathlib import Path

import pytest

from benchmarks.controller.engine_rows import counted
from benchmarks.controller.fake_pool import BINARY
from benchmarks.results import load

CONCURRENCY = 2  # most requests at once on a server
JSON_BYTES_PER_TOKEN = 80.0
BINARY_BYTES_PER_TOKEN = 12.0
CONNECTIONS_AT_ONCE = CONCURRENCY + 1  # the one more is for health requests
CONNECTIONS_OPENED = 10  # by one server of eight, of 64 requests that keep theirs and of control requests that do not
RESULTS = Path(__file__).parents[3] / "benchmarks/results/controller.json"


@pytest.mark.parametrize(("answers", "most"), [("json", JSON_BYTES_PER_TOKEN), (BINARY, BINARY_BYTES_PER_TOKEN)])
def test_counts_of_a_small_load(answers: str, most: float) -> None:
    found = counted(concurrency=CONCURRENCY, answer_format=answers)
    assert found["tokens"] > 200_000 and found["requests per server"] == 8
    assert 8 < found["bytes per token"] <= most
    assert 0 < found["connections at once"] <= CONNECTIONS_AT_ONCE
    assert 0 < found["connections opened"] <= CONNECTIONS_OPENED
    committed = {x["id"]: x["ours"] for x in load(RESULTS.with_name("cpu.json"))}
    if answers == "json":
        assert found["bytes per token"] == pytest.approx(committed["15/bytes per token, json"])
