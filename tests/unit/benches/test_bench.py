"""The committed figures: complete, consistent with themselves, and no better than the code gives when measured again."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import packing, token_stats
from benchmarks.results import OURS, ROWS, Measure, Object, SuiteOptions, Target, load

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


def test_a_target_compares_ours_with_a_peer() -> None:
    values = {OURS: 2.0, "trl": 3.0, "none": 0.0}
    assert Target("trl / ours", ">=", 1.5).met(values) and not Target("trl / ours", ">=", 1.51).met(values)
    assert Target(OURS, "<=", 2.0).met(values) and not Target(OURS, "<=", 1.9).met(values)
    assert Target("verl / ours", ">=", 1.0).met(values) is None
    assert not Target("ours / none", "<=", 1.3).met(values)
    assert str(Target.of("ours / longest first <= 0.1")) == "ours / longest first <= 0.1"


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


def test_the_rows_of_the_gpu_compute_on_a_cpu() -> None:
    """Inputs, calls, targets and table at a small size; the weight's gradient of both forms of ours is the plain one's."""
    from benchmarks.gpu.rows import TARGETS, layer_of, measure, our_layer, plain_formula, unfused_layer

    found = list(measure(torch.device("cpu"), rows=8, vocab=40, hidden=16, repetitions=1, square=16))
    assert [m.row for m in found] == [8, 8, 9, 9] and all(m.ours for m in found)
    assert [m.targets for m in found] == [(), TARGETS[8], (), TARGETS[9]]
    assert found[3].met is not None and "verl" not in found[0].peers
    for budget in (0, 10**6):
        given = layer_of(8, 40, 16, torch.device("cpu"))()
        ours, plain = our_layer(given, budget), unfused_layer(given, plain_formula)
        for x, y in ((ours[0], plain[0]), (given[1].main_grad, plain[1])):
            assert (x.float() - y.float()).norm() <= 0.01 * y.float().norm()
