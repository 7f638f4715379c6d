"""Benchmarks during a run: they change nothing of it, and a run that is killed ends as one that nobody killed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.command import parsers
from tepo_megatron.config import Config
from tepo_megatron.monitor import run_dir
from tests.parallel import resume_worlds as w
from tests.parallel.resume_worlds import Kill

pytestmark = pytest.mark.slow

BENCHMARKS = {
    "every": 2, "benchmarks": ["aime24", "minerva"], "benchmark_folder": "tests/problems", "benchmark_prompt": "<problem>",
    "benchmark_samples": 2, "benchmark_tokens": 16,
}  # fmt: skip


def evaluated(cfg: Config) -> dict[str, str]:
    """Every file of the run's benchmarks."""
    folder = cfg.run_dir / "evaluation"
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.json*"))}


@pytest.mark.full
def test_a_run_with_benchmarks_trains_as_one_without(model: Path, tmp_path: Path) -> None:
    outcomes = []
    for name, evaluation in (("without", {}), ("with", BENCHMARKS)):
        cfg = w.run_config(model, tmp_path / name, evaluation=evaluation)
        w.attempt(cfg, tmp_path / name / "journal")
        outcomes.append(w.outcome(cfg, tmp_path / name / "journal"))
    accuracies = outcomes[1].summary.pop("benchmarks")
    for benchmark in accuracies["before"]:
        recorded = [record.pop(f"evaluation/{benchmark}/accuracy") for record in outcomes[1].accuracies]
        assert (recorded[0], recorded[3]) == (accuracies["before"][benchmark], accuracies["after"][benchmark])
        assert all(record.pop(f"evaluation/{benchmark}/standard_error") >= 0 for record in outcomes[1].accuracies)
    w.assert_same(outcomes[1], outcomes[0])
    assert accuracies["before"].keys() == accuracies["after"].keys() == {"aime24", "minerva"}
    files = evaluated(cfg)
    steps = {"step-00000000", "step-00000002", "step-00000004", "step-00000005"}
    assert {file.partition("/")[0] for file in files} == steps
    log = (cfg.run_dir / "log.txt").read_text()
    for step in (0, 2, 4, 5):
        record = json.loads(files[f"step-{step:08d}/evaluation.json"])
        assert record["benchmarks"]["aime24"]["protocol"]["samples"] == 2 and record["step"] == step
        assert f"benchmarks at step {step}, avg@k: aime24 " in log
    assert accuracies["after"]["minerva"] == record["benchmarks"]["minerva"]["result"]["accuracy"]["mean"]
    assert files["step-00000000/aime24.jsonl"] != files["step-00000005/aime24.jsonl"]  # other weights answer otherwise
    against = (cfg.run_dir / "evaluation" / "step-00000005-against-00000000.md").read_text()
    assert "AIME24" in against and "Minerva" in against


@pytest.mark.full
def test_a_run_killed_during_benchmarks_ends_like_an_undisturbed_one(model: Path, tmp_path: Path) -> None:
    def run(name: str, *kills: Kill, **checkpoint: Any) -> tuple[w.Outcome, dict[str, str]]:
        cfg = w.run_config(model, tmp_path / name, evaluation=BENCHMARKS, checkpoint=checkpoint)
        w.lineage(cfg, tmp_path / name / "journal", *kills)
        return w.outcome(cfg, tmp_path / name / "journal"), evaluated(cfg)

    straight, files = run("straight")
    killed, files_after = run(
        "killed",
        Kill("tepo_megatron.evaluation.run_evaluations:sample_benchmark", call=2),  # before the first step
        Kill("tepo_megatron.evaluation.run_evaluations:sample_benchmark", step=4, after=True),
        Kill("tepo_megatron.evaluation.folder:replace_file", step=5, call=2),  # samples are there, and no record of them
        every=3,
        asynchronous=False,
    )
    w.assert_same(killed, straight)
    assert files_after == files


def _accuracies(cfg: Config, measure: str) -> list[float]:
    """Return the accuracy at each step."""
    if measure == "benchmarks":
        files = [cfg.run_dir / "evaluation" / f"step-{s:08d}" / "evaluation.json" for s in range(6)]
        results = [json.loads(path.read_text())["benchmarks"].values() for path in files]
        return [sum(b["result"]["accuracy"]["mean"] for b in of_step) / 2 for of_step in results]
    log = (cfg.run_dir / "log.txt").read_text()
    return [float(re.findall(rf"accuracy at step {s}: ([\d.]+)", log)[-1]) for s in range(6)]


@pytest.mark.full
@pytest.mark.parametrize("measure", ["benchmarks", "held_out"])
def test_the_best_checkpoint_stays(model: Path, tmp_path: Path, measure: str) -> None:
    """The newest and the best before it: the last evaluation comes after the last checkpoint."""
    evaluation = {**BENCHMARKS, "every": 1} if measure == "benchmarks" else {"every": 1, "samples": 4}
    checkpoint = {"every": 1, "keep_last": 1, "keep_best": True, "asynchronous": False}
    for seed in range(3, 9):  # until the best step before the newest one is not the one before it
        output = tmp_path / str(seed)
        cfg = w.run_config(model, output, evaluation=evaluation, checkpoint=checkpoint, seed=seed)
        w.lineage(cfg, output / "journal", Kill("tepo_megatron.monitor.sinks:RunLog.write", step=4))
        means = _accuracies(cfg, measure)
        before = max(range(1, 5), key=lambda step, means=means: (means[step], -step))
        if before < 4:
            break
    assert before < 4, f"nothing is shown by {means}"
    assert sorted(int(p.name[5:]) for p in (cfg.run_dir / "checkpoints").iterdir()) == [before, 5]
    best = max(range(1, 6), key=lambda step: (means[step], -step))
    assert json.loads((cfg.run_dir / "summary.json").read_text())["best_step"] == best


@pytest.mark.full
def test_a_run_that_gains_nothing_ends_early_and_is_finished(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every evaluation is the first one again where nothing is learned: the second in a row without a gain ends the run."""
    evaluation = {**BENCHMARKS, "every": 1, "patience": 2}
    cfg = w.run_config(model, tmp_path, evaluation=evaluation, checkpoint={"every": 3}, optimizer={"lr": 1e-30})
    w.lineage(cfg, tmp_path / "journal", Kill("tepo_megatron.actor.actor:Actor.export_hf"))  # the end is resumed
    summary = json.loads((cfg.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["stopped_early"]) == (2, True)
    assert summary["benchmarks"]["before"] == summary["benchmarks"]["after"]
    assert [r["step"] for r in w.records(cfg.run_dir)] == [1, 2]
    assert sorted(p.name for p in (cfg.run_dir / "checkpoints").iterdir()) == ["step-00000002"]
    resumed = replace(cfg, resume=True)
    assert run_dir.finished(resumed)
    assert parsers.main(["train", str(cfg.run_dir / "config.yaml"), "--resume", "true"]) == 0
    output = capsys.readouterr().out
    assert "finished, with 2 steps" in output and "only --evaluation.patience null makes it go on" in output
    assert not run_dir.finished(replace(resumed, evaluation=replace(cfg.evaluation, patience=None)))
