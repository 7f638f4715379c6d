"""Exactly once: a run that was killed anywhere and resumed ends as the run that nobody killed, bit for bit."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config
from tepo_megatron.rollout import record
from tests.parallel import resume_worlds as w
from tests.parallel.resume_worlds import HalfALine, Kill, Outcome

pytestmark = pytest.mark.slow

ENGINE, CHECKPOINT = "tests.parallel.resume_worlds:FollowingEngine.", "tepo_megatron.checkpoint."
EVALUATION = "tepo_megatron.evaluation.run_evaluations:"
# places of a kill in a step, and whether ranks other than 0 reach them
PLACES = {
    "tepo_megatron.rollout.collector:Collector.collect": False,
    ENGINE + "generate": False,
    "tepo_megatron.rewards.terms:WeightedReward.submit": False,
    "tepo_megatron.actor.actor:Actor.attach_old_stats": True,
    "tepo_megatron.actor.actor:Actor.update": True,
    "tepo_megatron.dist.platform.mcore:HostAdam._update": True,  # one parameter of an optimizer step
    "tepo_megatron.sync.push:WeightSync.push": True,
    ENGINE + "update_weights": False,
    "tepo_megatron.monitor.sinks:RunLog.write": False,
    CHECKPOINT + "checkpoints:Checkpoints.save": True,
    CHECKPOINT + "tensors:HostCopy.take": True,
    CHECKPOINT + "tensors:SavePlanner.agree": True,
    CHECKPOINT + "saving:write_items": True,
    CHECKPOINT + "saving:write_metadata": False,
    CHECKPOINT + "saving:write_manifest": False,
    CHECKPOINT + "folder:publish": False,
    CHECKPOINT + "folder:_to_deleted": False,
    "os:rmdir": False,  # the last call of a deletion
    EVALUATION + "evaluate": False,
}
AT_THE_END = {
    "tepo_megatron.actor.actor:Actor.export_hf": True,
    "tepo_megatron.models.hf_io:publish": False,
    EVALUATION + "evaluate": False,
    EVALUATION + "write_evaluation": False,
    "tepo_megatron.service.main_driver:replace_file": False,  # writes the summary
    "tepo_megatron.report:write_report": False,
    "tepo_megatron.service.main_driver:MainDriver.finish": False,
}


@pytest.mark.full
def test_a_run_killed_several_times_ends_like_an_undisturbed_one(
    straight: Callable[[int], Outcome], model: Path, tmp_path: Path
) -> None:
    cfg = w.run_config(model, tmp_path, checkpoint={"every": 1, "asynchronous": False})
    w.lineage(
        cfg,
        tmp_path / "journal",
        Kill(ENGINE + "generate", step=1, after=True),  # before the first checkpoint
        Kill("tepo_megatron.actor.actor:Actor.update", step=2, call=2),
        HalfALine("tepo_megatron.monitor.sinks:RunLog.write", step=2),
        Kill(CHECKPOINT + "saving:write_manifest", step=3),
        Kill(CHECKPOINT + "folder:_to_deleted", step=3, call=2, after=True),
        Kill("tepo_megatron.models.hf_io:publish"),
    )
    w.assert_same(w.outcome(cfg, tmp_path / "journal"), straight(1))
    lost = (tmp_path / "run" / "metrics.lost.jsonl").read_text()
    assert [lost.count(f'{{"step": {step}') for step in ("\n", "2,", "3,", "4,", "5,")] == [1, 0, 1, 0, 0]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000004", "step-00000005"]


def test_prompts_that_were_sampled_ahead_of_a_kill_are_not_lost(model: Path, tmp_path: Path) -> None:
    """A checkpoint holds the place of what was trained: the next step's rollouts are there when it is written."""

    def prompts(folder: Path, *kills: Kill) -> list[list[int]]:
        ahead = {"max_staleness": 1, "record": True, "filter_uniform_groups": False, "max_generation_rounds": 1}
        cfg = w.run_config(model, folder, rollout=ahead, checkpoint={"every": 1, "asynchronous": False})
        w.lineage(cfg, folder / "journal", *kills)
        steps = [record.read(cfg.run_dir / record.FOLDER, step)[0] for step in range(1, w.STEPS + 1)]
        return [[r.prompt_id for r in rollouts] for rollouts in steps]

    killed = prompts(tmp_path / "killed", Kill("tepo_megatron.monitor.sinks:RunLog.write", step=4))
    assert killed == prompts(tmp_path / "straight") and len({tuple(step) for step in killed}) == w.STEPS


WITH_EXPORT = {"every": 1, "hf": True, "asynchronous": False}
OF_CHECKPOINTS = [where for where in PLACES if where.startswith(CHECKPOINT) or where == "os:rmdir"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("tp", "checkpoint", "where"),
    [
        *((1, {"every": 1}, where) for where in (*PLACES, *AT_THE_END)),
        *((2, {"every": 2}, where) for where, on_all in (PLACES | AT_THE_END).items() if on_all),
        *((2, WITH_EXPORT, where) for where in (*OF_CHECKPOINTS, "tepo_megatron.models.hf_io:publish")),
    ],
    ids=str,
)
def test_a_kill_at_any_place_changes_nothing(
    straight: Callable[[int], Outcome], model: Path, tmp_path: Path, where: str, tp: int, checkpoint: dict[str, Any]
) -> None:
    """Kill before the call, and in the resumed run after the call."""
    cfg = w.run_config(model, tmp_path, parallel={"tp": tp}, checkpoint=checkpoint)
    rank = tp - 1 if (PLACES | AT_THE_END)[where] else 0
    first, second = (w.STEPS, 0) if where in AT_THE_END else (3, 3)  # the resumed run may have no step left to take
    kills = [Kill(where, first, rank=rank), Kill(where, second, rank=rank, after=True)]
    if where.endswith("write_report"):  # the run is finished by then, and nothing is resumed
        kills.pop()
    w.lineage(cfg, tmp_path / "journal", *kills)
    w.assert_same(w.outcome(cfg, tmp_path / "journal"), straight(tp))


kills = st.builds(
    lambda where, step, after, rank: Kill(where, step, after=after, rank=rank * PLACES[where]),
    st.sampled_from(sorted(PLACES)), st.integers(1, w.STEPS), st.booleans(), st.integers(0, 1),
)  # fmt: skip


def made(model: Path, tmp_path: Path, **sections: Any) -> Config:
    """A finished run of three steps, with a checkpoint of each of the last two."""
    cfg = w.run_config(model, tmp_path, **{"training": {"steps": 3}, "checkpoint": {"every": 1}} | sections)
    w.attempt(cfg, tmp_path / "journal")
    return cfg


def log_of(cfg: Config) -> str:
    return (cfg.run_dir / "log.txt").read_text()


def test_a_finished_run_stays_as_it_is_or_goes_on_to_more_steps(
    straight: Callable[[int], Outcome], model: Path, tmp_path: Path
) -> None:
    cfg = made(model, tmp_path)
    before = w.outcome(cfg, tmp_path / "journal")
    fewer = replace(cfg, resume=True, training=replace(cfg.training, steps=2))
    with pytest.raises(ConfigError, match=r"training\.steps=2: .* ended at step 3"):
        w.attempt(fewer, tmp_path / "journal", 1)
    asked = w.journal_rows(tmp_path / "journal")
    w.attempt(replace(cfg, resume=True), tmp_path / "journal", 1)
    assert w.journal_rows(tmp_path / "journal") == asked and "resume: " not in log_of(cfg)
    shutil.rmtree(cfg.run_dir / "hf")
    w.attempt(replace(cfg, resume=True), tmp_path / "journal", 2)
    w.assert_same(w.outcome(cfg, tmp_path / "journal"), before)
    (cfg.run_dir / "summary.json").rename(tmp_path / "summary.json")
    with pytest.raises(AssertionError, match=r"training\.steps=2: the newest checkpoint is of step 3 already"):
        w.attempt(fewer, tmp_path / "journal", 1)
    (tmp_path / "summary.json").rename(cfg.run_dir / "summary.json")

    former = (cfg.run_dir / "summary.json").read_text()
    w.attempt(w.run_config(model, tmp_path, checkpoint={"every": 1}, resume=True), tmp_path / "journal", 3)
    longer = w.outcome(cfg, tmp_path / "journal")
    assert longer.accuracies.pop(2)["step"] == 3  # which was the last step once
    w.assert_same(longer, straight(1))
    assert (cfg.run_dir / "summary.former.json").read_text() == former
    lines = [line for line in log_of(cfg).splitlines() if line.startswith("resume: ")]
    assert lines[-2:] == ["resume: from the checkpoint of step 3", "resume: training.steps was 3 and is 5"]


@pytest.mark.full
def test_damaged_checkpoints_are_passed_over_and_other_data_is_refused(model: Path, tmp_path: Path) -> None:
    """A damaged checkpoint is passed over; one of other prompts is refused before a record moves."""
    cfg = made(model, tmp_path)
    before = w.outcome(cfg, tmp_path / "journal")
    (cfg.run_dir / "summary.json").unlink()  # otherwise nothing is left to do
    newest = cfg.run_dir / "checkpoints" / "step-00000003" / "__0_0.distcp"
    newest.write_bytes(newest.read_bytes()[:-1])
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(Path(cfg.data.train).read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(AssertionError, match=r"DataError: the checkpoint's place in the dataset.*count was 13 and is 12"):
        w.attempt(replace(cfg, resume=True, data=replace(cfg.data, train=str(fewer))), tmp_path / "journal", 1)
    assert w.records(cfg.run_dir) == before.records

    other = replace(cfg, resume=True, evaluation=replace(cfg.evaluation, max_problems=3))
    w.attempt(other, tmp_path / "journal", 2)
    assert w.records(cfg.run_dir) == before.records and log_of(cfg).count(str(newest)) == 2  # once in each attempt
    assert "resume: from the checkpoint of step 2" in log_of(cfg) and "1 recorded steps are taken again" in log_of(cfg)
    assert "resume: evaluation.max_problems was None and is 3" in log_of(cfg)
    summary = json.loads((cfg.run_dir / "summary.json").read_text())
    finished = (cfg.run_dir / "summary.json").read_bytes()
    refused = replace(other, data=replace(cfg.data, train=str(fewer)), training=replace(cfg.training, steps=4))
    with pytest.raises(AssertionError, match="DataError: the checkpoint's place in the dataset"):
        w.attempt(refused, tmp_path / "journal", 3)
    assert (cfg.run_dir / "summary.json").read_bytes() == finished, "a refused resume demoted a finished run"
    assert summary["accuracy_before"] is None and summary["accuracy_after"] is not None


@pytest.mark.full
def test_damaged_records_are_reported_and_the_run_completes(
    straight: Callable[[int], Outcome], model: Path, tmp_path: Path
) -> None:
    """Every record that can be read is there once at the end, and the run ends as if nothing had happened to its records."""
    cfg = made(model, tmp_path, rollout={"record": True})
    metrics, lost, folder = (cfg.run_dir / name for name in ("metrics.jsonl", "metrics.lost.jsonl", "rollouts"))
    before, first, second, of_2, third, of_3 = metrics.read_text().splitlines()  # with evaluations at 0, 2 and 3
    # half of step 2, then step 3 twice and before step 1, and no end
    metrics.write_text(f"{third}\r\n{second[:50]}\n\0garbage\n{of_3}\n{first}\n{before}\n{third}")
    record = folder / "step-000001.safetensors"
    record.write_bytes(record.read_bytes()[:-3])
    more = {"rollout": {"record": True}, "checkpoint": {"every": 1}, "resume": True}
    w.attempt(w.run_config(model, tmp_path, training={"steps": 4}, **more), tmp_path / "journal", 1)
    log = log_of(cfg)
    for words in (
        "resume: metrics.jsonl: line 2 cannot be read", "resume: metrics.jsonl: line 3 cannot be read",
        "resume: metrics.jsonl: recorded more than once (the later record counts): step 3",
        "resume: metrics.jsonl: no record of step 2, and what is lost cannot be made again",
        "resume: 3 other lines of metrics.jsonl moved to metrics.lost.jsonl", f"resume: {record}: not the recorded rollouts",
    ):  # fmt: skip
        assert words in log, words
    recorded = metrics.read_text().splitlines()
    assert recorded[:4] == [before, first, third, of_3] and len(recorded) == 6 and lost.read_text().count(third) == 1
    metrics.write_text("")  # and once more, all of it
    w.attempt(w.run_config(model, tmp_path, **more), tmp_path / "journal", 2)
    assert "resume: metrics.jsonl: no record of steps 1 to 4," in log_of(cfg)
    metrics.write_text("\n".join([before, first, second, of_2, third, *recorded[4:], *metrics.read_text().splitlines()]))
    w.assert_same(w.outcome(cfg, tmp_path / "journal"), straight(1))
