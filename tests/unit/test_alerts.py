"""The rules of alerts on recorded runs, healthy and not; raising, ending and resuming."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.command.parsers import main
from tepo_megatron.config import LoggingConfig
from tepo_megatron.monitor.alerts import CLEAR, RULES, AlertWatch, judge
from tepo_megatron.monitor.sinks import RunLog, read_metrics
from tools import alert_figures

BAD = {"rollout/kept_groups": 0.0, "rollout/sampled_groups": 8.0}
RUNS = Path(__file__).parents[1] / "data" / "alert_runs.jsonl.gz"


def runs() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(RUNS.read_bytes()).splitlines()]


def test_healthy_runs_raise_nothing_and_faults_are_found() -> None:
    raised = {run["name"]: {a.rule.name for a in judge((r["step"], r) for r in run["records"])} for run in runs()}
    healthy = [run["name"] for run in runs() if run["expected"] is None]
    assert len(healthy) >= 20 and {name: raised[name] for name in healthy if raised[name]} == {}
    planted = [run for run in runs() if run["expected"] is not None]
    assert {run["expected"] for run in planted} == {rule.name for rule in RULES}
    assert [run["name"] for run in planted if run["expected"] not in raised[run["name"]]] == []
    assert RUNS.stat().st_size + alert_figures.FRESH.stat().st_size < 300_000
    assert "With other seeds: Found: 9 of 9. False alarms in 20 healthy runs" in alert_figures.table()
    assert alert_figures.PAGE.read_text() == alert_figures.page(alert_figures.PAGE.read_text()), "run tools.alert_figures"


def test_a_model_that_learns_at_once_has_not_collapsed() -> None:
    """SmolLM2-135M on sums (make smollm): its first steps are no noise, and what it gains in them is a gain."""
    rewards = [0.09, 0.11, 0.27, 0.41, 0.51, 0.64, 0.65, 0.69, 0.66, 0.77, 0.8, 0.63, 0.93, 0.77, 0.73, 0.73, 0.62, 0.77, 0.73]
    entropies = [2.2, 2.0, 1.5, 1.2, 0.58, 0.42, 0.46, 0.49, 0.37, 0.3, 0.32, 0.4, 0.22, 0.29, 0.28, 0.35, 0.28, 0.29, 0.25]
    records = [{"reward/mean": r, "actor/entropy": h} for r, h in zip(rewards, entropies, strict=True)]
    assert judge(enumerate(records, 1)) == []
    flat = [record | {"reward/mean": 0.3} for record in records]
    assert [alert.rule.name for alert in judge(enumerate(flat, 1))] == ["entropy_collapse"]


def test_an_alert_is_raised_once_and_again_only_after_it_has_ended() -> None:
    watch, bad, good = AlertWatch(), BAD, BAD | {"rollout/kept_groups": 8.0}
    series = [bad] * 6 + [good] * (CLEAR - 1) + [bad] * 3 + [{}] * 20 + [good] * CLEAR + [bad] * 3
    raised = [step for step, record in enumerate(series, start=1) if watch.observe(step, record)]
    assert raised == [2, len(series) - 1] and watch.active == ["groups_filtered"]
    for step in range(CLEAR):
        assert watch.observe(step, good) == []
    assert watch.active == []


def test_a_run_logs_alerts_and_a_resumed_one_does_not_repeat_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path, LoggingConfig(), steps=9) as log:
        for step in range(1, 5):
            log.write(step, BAD)
    assert ["alert/groups_filtered" in record for record in read_metrics(tmp_path)] == [False, True, True, True]
    lines = [line for line in (tmp_path / "log.txt").read_text().split("\n") if line.startswith("alert ")]
    assert len(lines) == 1 and "groups_filtered (step 2)" in lines[0]
    with RunLog(tmp_path, LoggingConfig(), steps=9) as log:
        log.rewind(4)
        log.write(5, BAD)
    assert read_metrics(tmp_path)[-1]["alert/groups_filtered"] == 1
    assert (tmp_path / "log.txt").read_text().count("alert groups_filtered") == 1
    capsys.readouterr()
    assert main(["alerts", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "1 alert in 5 steps" in printed and "use easier or harder prompts" in printed
