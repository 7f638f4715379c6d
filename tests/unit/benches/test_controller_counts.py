"""Counted costs of the rollout data path stay within their bounds, with the engine client in front of eight fake servers."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.controller.engine_rows import counted
from benchmarks.controller.fake_pool import BINARY
from benchmarks.controller.measuring import Point, power_law
from benchmarks.controller.parts import PARTS, GrowthRow, SingleFigure
from benchmarks.controller.results_table import load_results, markdown, save_results
from benchmarks.results import Target, load

CONCURRENCY = 2  # most requests at once on a server
JSON_BYTES_PER_TOKEN = 80.0
BINARY_BYTES_PER_TOKEN = 12.0
WAKEUPS_PER_REQUEST = 5.0  # of all tasks of the engine client: group, request, slot, decoding
CONNECTIONS_AT_ONCE = CONCURRENCY + 1  # the one more is for health requests
CONNECTIONS_OPENED = 10  # by one server of eight, of 64 requests that keep theirs and of control requests that do not
RESULTS = Path(__file__).parents[3] / "benchmarks/results/controller.json"


def check_counts(found: dict[str, float]) -> None:
    """Assert that wake-ups and connections are within their bounds, and that the load was the one that they are meant for."""
    assert found["tokens"] > 200_000 and found["requests per server"] == 8
    assert 0 < found["wake-ups per request"] <= WAKEUPS_PER_REQUEST
    assert 0 < found["connections at once"] <= CONNECTIONS_AT_ONCE
    assert 0 < found["connections opened"] <= CONNECTIONS_OPENED


def test_counts_with_json_answers() -> None:
    found = counted(concurrency=CONCURRENCY)
    assert 8 < found["bytes per token"] <= JSON_BYTES_PER_TOKEN
    check_counts(found)
    committed = {x["id"]: x["ours"] for x in load(RESULTS.with_name("cpu.json"))}
    assert found["bytes per token"] == pytest.approx(committed["15/bytes per token, json"])


def test_counts_with_binary_answers() -> None:
    found = counted(concurrency=CONCURRENCY, answer_format=BINARY)
    assert 8 < found["bytes per token"] <= BINARY_BYTES_PER_TOKEN
    check_counts(found)


def test_the_exponent_of_growth_is_that_of_the_power_law() -> None:
    exponent, factor = power_law([Point(size, 0.5 * size**2) for size in (1.0, 4.0, 12.0)])
    assert exponent == pytest.approx(2.0) and factor == pytest.approx(0.5)
    linear = GrowthRow("a", [Point(size, 0.5 * size) for size in (1.0, 12.0)], target=0.4).as_object()
    assert linear["at_largest"] == pytest.approx(33.5) and linear["extrapolated"] and linear["met"] is False
    assert GrowthRow("a", [Point(size, 0.5 * size) for size in (1.0, 67.0)], target=0.6).as_object()["met"] is True
    assert GrowthRow("a", [Point(size, 0.1 * size**1.2) for size in (1.0, 12.0)]).as_object()["met"] is False


def test_a_figure_that_did_not_run_misses_its_target() -> None:
    assert SingleFigure("a", None, target=Target("value", "<=", 1)).as_object()["met"] is False
    assert SingleFigure("a", 1.0, target=Target("value", "<=", 1)).as_object()["met"] is True
    assert SingleFigure("a", 1.0).as_object()["met"] is None


def part_of(rows: list[GrowthRow], figures: list[SingleFigure], error: str = "") -> dict[str, Any]:
    """A part as the command writes it."""
    machine = {"cores": 2, "cpu": "a", "memory_gib": 1.0, "load": [0.5, 0.5]}
    written = {"rows": [row.as_object() for row in rows], "figures": [figure.as_object() for figure in figures]}
    return {"machine": machine, "commit": "c" * 40, "sizes": [1.0, 4.0], "error": error} | written


def test_the_table_has_both_states_of_a_row_one_below_the_other(tmp_path: Path) -> None:
    slow, fast = (GrowthRow("read", [Point(1.0, a), Point(4.0, 4 * a)]) for a in (1.0, 0.25))
    results = {
        "before": {"take": part_of([slow], [SingleFigure("runs", None, "s", Target("value", "<=", 1), "it died")])},
        "now": {
            "take": part_of([fast], [SingleFigure("runs", 0.5, "s", Target("value", "<=", 1))]),
            "tail": part_of([], [], "no"),
        },
    }
    save_results(tmp_path / "out.json", results)
    assert load_results(tmp_path / "out.json") == results
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (tmp_path / "out.md").read_text().splitlines()]
    rows = [line[:6] for line in lines if line[:1] == ["read"]]
    assert rows == [["read", "before", "1", "4", "67 x", "1.00"], ["read", "now", "0.25", "1", "16.8 x", "1.00"]]
    assert ["runs", "before", "did not run", "<= 1", "MISSED", "it died"] in lines
    assert ["runs", "now", "0.5 s", "<= 1", "met", ""] in lines
    assert ["tail", "now", "not measured", "", "", "no"] in lines


def test_the_committed_table_is_that_of_the_committed_figures() -> None:
    results = load_results(RESULTS)
    assert results["before"].keys() <= PARTS.keys()
    assert RESULTS.with_suffix(".md").read_text() == markdown(results)
    assert all(len(part["commit"].split()[0]) == 40 for found in results.values() for part in found.values())
