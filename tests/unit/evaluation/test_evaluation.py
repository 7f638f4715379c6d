"""Accuracy and its standard error, and the step log's arithmetic."""

import math
import statistics
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.actor.accumulator import UpdateResult
from tepo_megatron.base.errors import RolloutError, SyncError
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import SyncConfig
from tepo_megatron.config.io import validate
from tepo_megatron.evaluation import Scores, read_evaluation, run_evaluations, write_evaluation
from tepo_megatron.evaluation.held_out import Accuracy, accuracy, evaluate
from tepo_megatron.monitor.metrics import Metrics, counts
from tepo_megatron.monitor.tracer import Clock
from tepo_megatron.rollout.containment import lost_sample
from tepo_megatron.trainer.driver import StepLog
from tepo_megatron.trainer.gate import check_mismatch
from tests.scripted_groups import ScriptedGroups


def graded(prompt: int, score: float) -> Rollout:
    return Rollout(prompt, torch.tensor([1, 2]), torch.tensor([False, True]), torch.zeros(2), 0, "stop", score=score)


def test_standard_error_is_clustered_by_problem() -> None:
    """Eight copies of each answer say no more than one."""
    once = accuracy([graded(i, float(i % 3 == 0)) for i in range(30)])
    copied = accuracy([graded(i, float(i % 3 == 0)) for i in range(30) for _ in range(8)])
    assert copied.standard_error == pytest.approx(once.standard_error)
    assert (copied.problems, copied.samples) == (30, 8)
    means = [[1, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]]
    mixed = accuracy([graded(i, s) for i, scores in enumerate(means) for s in scores])
    assert mixed.standard_error == pytest.approx(statistics.stdev([0.75, 0.25, 1.0]) / math.sqrt(3))


def test_scores_of_single_problems_survive_the_file(tmp_path: Path) -> None:
    before = accuracy([graded(i, s) for i, scores in ((3, (0, 0)), (7, (1, 0))) for s in scores])
    after = accuracy([graded(i, s) for i, scores in ((3, (1, 0)), (7, (1, 1))) for s in scores])
    write_evaluation(tmp_path, before, after)
    assert read_evaluation(tmp_path) == Scores({3: 0.0, 7: 0.5}, {3: 0.5, 7: 1.0})


def test_lost_samples_are_counted_and_too_many_are_no_accuracy(caplog: pytest.LogCaptureFixture) -> None:
    """A proxy or a dead tool server fails every sample: that is no accuracy of 0."""
    lost = [replace(lost_sample(Prompt(i, (1,), ""), 0, "no route"), score=0.0) for i in range(2)]

    class Engine:
        def open(self) -> ScriptedGroups:
            return ScriptedGroups(lambda prompts, sampling, seed: [*lost, *(graded(i, 1.0) for i in range(2, 8))])

    class Grader:
        def submit(self, group: list[Rollout]) -> Future[list[Rollout]]:
            future = Future[list[Rollout]]()
            future.set_result(group)
            return future

    asked: Any = Engine(), Grader(), [Prompt(i, (1,), "") for i in range(8)], SamplingParams(samples=1), 5
    result = evaluate(*asked, max_failed_share=0.25)
    assert (result.mean, result.lost) == (0.75, 2) and "2 of them lost" in str(result)
    assert caplog.messages == ["evaluation: 2 of 8 samples were lost; the first: no route"]
    with pytest.raises(RolloutError, match=r"evaluation: 2 of 8 .* rollout.max_failed_share=0.2; .* no route"):
        evaluate(*asked, max_failed_share=0.2)


def test_an_evaluation_samples_as_its_own_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation takes neither temperature nor number of samples nor replayed experts from training."""
    asked = []

    def record(engine: Any, reward: Any, prompts: Any, sampling: SamplingParams, seed: int, **limits: float) -> Accuracy:
        asked.append((sampling, seed))
        return accuracy([graded(0, 1.0)])

    monkeypatch.setattr(run_evaluations, "evaluate", record)
    tree = {"name": "a", "platform": "cpu", "model": {"path": "m"}, "data": {"train": "t"}, "seed": 3}
    cfg = validate(tree | {"evaluation": {"temperature": 0.3, "samples": 5}})
    training = SamplingParams(samples=8, temperature=1.0, max_tokens=7)
    evaluations = run_evaluations.Evaluations(
        cfg.evaluation, [Prompt(0, (1,), "1")], None, seed=cfg.seed, run_dir=cfg.run_dir, keep_best=False
    )
    for step in (0, 4):
        assert len(list(evaluations.measure(step, None, None, training, max_failed_share=0.0))) == 1
    (first, seed), second = asked
    assert (first.temperature, first.samples, first.max_tokens, first.routing) == (0.3, 5, 7, None)
    assert second == (first, seed), "before and after are compared on the same random numbers"


def result(update: int, mask: float, ratios: list[float]) -> UpdateResult:
    pairs = {"loss/total": (0.5, 1.0), "tepo/kl_mask_share": (mask, 10.0), "actor/grad_norm": (2.0 + update, 1.0)}
    histograms = {"tepo/dH_up": counts(torch.tensor([1e-3, 1e-3, -1e-5]) if update else torch.ones(9))}
    return UpdateResult(pairs, histograms, torch.tensor(ratios, dtype=torch.float64), knows_entropy_change=update > 0)


def test_the_first_update_of_a_rollout_batch_reports_no_mask() -> None:
    """The entropy change of the first update is rounding noise, since it has the weights of the old pass."""
    log = StepLog()
    log.add(result(0, 9.0, [1.0, 1.0]))
    log.add(result(1, 3.0, [0.9, 1.1]))
    record = log.record(Clock())
    assert record["tepo/kl_mask_share"] == pytest.approx(0.3)
    assert record["actor/grad_norm"] == pytest.approx(2.5)
    assert record["tepo/dH_up_p50"] == pytest.approx(1e-3, rel=0.04)  # half a bin of the histogram
    assert record["tepo/dH_up_p05"] == pytest.approx(-1e-5, rel=0.04) and record["tepo/dH_down_p50"] is None
    assert record["tepo/ratio_p50"] == pytest.approx(1.0)
    assert 0.9 <= record["tepo/ratio_p01"] < 0.91 and 1.09 < record["tepo/ratio_p99"] <= 1.1


def test_a_step_without_an_informative_group_has_nulls() -> None:
    log = StepLog()
    metrics = Metrics()
    metrics.add("reward/mean", 0.0)
    log.receive(0, metrics)
    record = log.record(Clock())
    assert record["reward/mean"] == 0.0 and record["loss/total"] is None and record["tepo/ratio_p50"] is None
    assert record["tokens_per_second"] == 0.0


def test_mismatch_above_the_limit_is_a_sync_error() -> None:
    cfg = SyncConfig(max_logprob_diff=1e-3)
    check_mismatch(9e-4, 3, cfg)
    with pytest.raises(SyncError, match=r"1\.10e-03 nats at version 3, above sync\.max_logprob_diff=0\.001"):
        check_mismatch(1.1e-3, 3, cfg)
    with pytest.raises(SyncError):
        check_mismatch(math.nan, 3, cfg)
    # a server alone has a margin for chance, less with more tokens, and is named
    check_mismatch(1.1e-3, 3, cfg, "server 1", 1000)
    with pytest.raises(SyncError, match=r"at version 3 over 10000 tokens of server 1, above .*: server 1 does not serve"):
        check_mismatch(1.1e-3, 3, cfg, "server 1", 10000)
    with pytest.raises(SyncError):
        check_mismatch(math.nan, 3, cfg, "server 1", 1)
