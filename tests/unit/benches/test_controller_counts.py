"""Counted costs of the rollout data path stay within their bounds, with the engine client in front of eight fake servers."""

import json
from pathlib import Path

import pytest

from benchmarks.controller.__main__ import PARTS, growth, markdown
from benchmarks.controller.engine_rows import counted
from benchmarks.controller.fake_pool import BINARY
from benchmarks.controller.measuring import Point, power_law
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


def test_the_exponent_of_growth_is_that_of_the_power_law() -> None:
    exponent, factor = power_law([Point(size, 0.5 * size**2) for size in (1.0, 4.0, 12.0)])
    assert exponent == pytest.approx(2.0) and factor == pytest.approx(0.5)
    assert growth("a", [Point(size, 0.5 * size) for size in (1.0, 12.0)], target=0.4)["met"] is False
    assert growth("a", [Point(size, 0.5 * size) for size in (1.0, 67.0)], target=0.6)["met"] is True
    assert growth("a", [Point(size, 0.1 * size**1.2) for size in (1.0, 12.0)])["met"] is False


def test_the_committed_table_is_that_of_the_committed_figures() -> None:
    results = json.loads(RESULTS.read_text())
    assert list(results) == list(PARTS) and not any(part["error"] for part in results.values())
    for row in (row for part in results.values() for row in part["rows"]):
        again = growth(row["title"], [Point(**point) for point in row["points"]], row["target"])
        assert again["met"] == row["met"] and again["exponent"] == pytest.approx(row["exponent"])
    assert RESULTS.with_suffix(".md").read_text() == markdown(results)
    assert all(len(part["commit"].split()[0]) == 40 for part in results.values())
