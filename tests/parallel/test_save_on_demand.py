"""A run that is asked to end in any phase saves its last step, ends, and goes on as if nobody had asked, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.save_requests import FILES, SAVE, STOPPED
from tepo_megatron.rollout import record
from tests.marks import full_but
from tests.parallel import resume_worlds as w
from tests.parallel.resume_worlds import Kill, Outcome, Request

pytestmark = pytest.mark.slow

ENGINE, LOOP, LOG = (
    "tests.parallel.resume_worlds:FollowingEngine.",
    "tepo_megatron.trainer.schedule:Schedule.",
    "RunLog.write",
)
UPDATE, EVALUATE = "tepo_megatron.actor.actor:Actor.update", "tepo_megatron.evaluation.run_evaluations:evaluate"
RECORD = f"tepo_megatron.monitor.sinks:{LOG}"
# phase -> where the request comes, and from which step on
PHASES = {
    "start": (LOOP + "publish_first_weights", 0),
    "first evaluation": (EVALUATE, 0),
    "rollout": (ENGINE + "generate", 3),
    "grading": ("tepo_megatron.rewards.terms:WeightedReward.submit", 3),
    "old statistics": ("tepo_megatron.actor.actor:Actor.attach_old_stats", 3),
    "update": (UPDATE, 3),
    "weight update": ("tepo_megatron.sync.push:WeightSync.push", 3),
    "record": (RECORD, 3),
    "evaluation": (EVALUATE, 3),
    "save": ("tepo_megatron.checkpoint.checkpoints:Checkpoints.save", 3),
    "writing": ("tepo_megatron.checkpoint.saving:write_items", 3),
    "last update": (UPDATE, w.STEPS),
    "export": ("tepo_megatron.actor.actor:Actor.export_hf", 0),
    "last evaluation": (EVALUATE, w.STEPS),
}
NEVER_SAVED = ("save", "writing")  # phases that exist only with checkpoint.every


def assert_no_step_was_repeated(run: Path, stops: int) -> None:
    """Assert that each of these requests ended the run, and that no recorded step was taken twice."""
    log = (run / "log.txt").read_text()
    assert log.count("ended on request after step ") == stops
    assert not (run / "metrics.lost.jsonl").exists(), "a recorded step was not in the checkpoint"
    assert not any((run / name).exists() for name in FILES), "the resumed run removes requests and answers"


@pytest.mark.full
@pytest.mark.parametrize(
    ("tp", "checkpoint", "phase"),
    [
        *((1, {"every": 0}, phase) for phase in PHASES if phase not in NEVER_SAVED),
        *((2, {"every": 1}, phase) for phase in PHASES),
        *((2, {"every": 2, "asynchronous": False}, phase) for phase in PHASES),
    ],
)
def test_a_request_in_any_phase_changes_nothing(
    straight: Callable[[int], Outcome], model: Path, tmp_path: Path, tp: int, checkpoint: dict[str, Any], phase: str
) -> None:
    cfg = w.run_config(model, tmp_path, parallel={"tp": tp}, checkpoint=checkpoint)
    w.lineage(cfg, tmp_path / "journal", Request(*PHASES[phase]))
    w.assert_same(w.outcome(cfg, tmp_path / "journal"), straight(tp))
    assert_no_step_was_repeated(cfg.run_dir, 1)


AHEAD = {"filter_uniform_groups": False, "max_generation_rounds": 1, "record": True}
MODES: dict[str, dict[str, Any]] = {
    "colocated": {"rollout": AHEAD | {"colocate": True}},
    "one step ahead": {"rollout": AHEAD | {"max_staleness": 1}},
    "partial rollouts": {"rollout": AHEAD | {"max_staleness": 2, "on_weight_update": "continue", "oversample": 1.5}},
}


@pytest.mark.parametrize(
    "phase", [pytest.param("rollout"), *(pytest.param(p, marks=pytest.mark.full) for p in ("update", "evaluation"))]
)
@pytest.mark.parametrize("mode", full_but(["one step ahead"], [], MODES))
def test_every_schedule_saves_its_last_step_and_takes_the_same_prompts(
    model: Path, tmp_path: Path, mode: str, phase: str
) -> None:
    def prompts(folder: Path, *requests: Kill) -> list[list[int]]:
        cfg = w.run_config(model, folder, **MODES[mode])
        w.lineage(cfg, folder / "journal", *requests)
        assert_no_step_was_repeated(cfg.run_dir, len(requests))
        steps = [record.read(cfg.run_dir / record.FOLDER, step)[0] for step in range(1, w.STEPS + 1)]
        return [sorted({r.prompt_id for r in rollouts}) for rollouts in steps]

    asked = prompts(tmp_path / "asked", Request(*PHASES[phase]))
    assert len(asked) == w.STEPS and all(asked)
    if mode != "partial rollouts":  # with which the order of arrival decides
        assert asked == prompts(tmp_path / "straight")


def test_a_request_to_save_is_answered_once_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    cfg = w.run_config(model, tmp_path, checkpoint={"keep_last": 9})
    w.attempt(cfg, tmp_path / "journal", 0, Request(ENGINE + "generate", 3, name=SAVE))
    saved = {path.name for path in (cfg.run_dir / "checkpoints").iterdir()}
    assert saved == {"step-00000003", f"step-{w.STEPS:08d}"}, "a run that has saved ends with a checkpoint"
    assert not (cfg.run_dir / SAVE).exists() and not (cfg.run_dir / STOPPED).exists()
    assert len(w.records(cfg.run_dir)) == w.STEPS


def test_steps_are_followed_by_checkpoints_by_time(model: Path, tmp_path: Path) -> None:
    cfg = w.run_config(model, tmp_path, checkpoint={"keep_last": 9, "every": "0.0001 min"})
    w.attempt(cfg, tmp_path / "journal")
    assert len(list((cfg.run_dir / "checkpoints").iterdir())) == w.STEPS
