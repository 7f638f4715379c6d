"""`tepo replay`: a run comes out again bit for bit, and what differs is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tepo_megatron.config import Config
from tepo_megatron.config.io import plain
from tepo_megatron.errors import ConfigError, DataError
from tepo_megatron.launcher.replay import ReplayRequest, parts_of, replay
from tepo_megatron.rollout import decisions, record
from tepo_megatron.types import Rollout
from tests.parallel import resume_worlds as w
from tests.parallel.resume_worlds import Kill

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return w.write_inputs(tmp_path_factory.mktemp("inputs") / "model")


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A recorded run on one rank that was killed in its third step, and went on with two ranks and another learning rate."""
    folder = tmp_path_factory.mktemp("killed")
    cfg = w.run_config(model, folder, rollout={"record": True}, checkpoint={"every": 2, "asynchronous": False})
    with pytest.raises(AssertionError):
        w.attempt(cfg, folder / "journal", 0, Kill("tepo_megatron.observability.sinks:RunLog.write", step=3))
    other = replace(cfg, resume=True, parallel=replace(cfg.parallel, tp=2), optimizer=replace(cfg.optimizer, lr=2e-3))
    w.attempt(other, folder / "journal", 1)
    return cfg


def made_in(journal: Path) -> Callable[[Config], None]:
    return lambda cfg: w.attempt(cfg, journal)


def repeat(cfg: Config, journal: Path, **changes: object) -> tuple[int, list[str]]:
    said: list[str] = []
    request = ReplayRequest(cfg.run_dir, **changes)  # type: ignore[arg-type]
    status = replay(request, said.append, made_in(journal))
    return status, said


@pytest.mark.full
def test_a_run_that_went_on_with_other_settings_comes_out_again(killed: Config, tmp_path: Path) -> None:
    status, said = repeat(killed, tmp_path / "journal")
    assert not (tmp_path / "journal").exists(), "an engine was asked"
    assert [line.partition(" of ")[0] for line in said[:2]] == ["steps 1 to 2", f"steps 3 to {w.STEPS}"]
    assert said[2] == f"every number of the steps 1 to {w.STEPS} is equal"
    assert said[3].endswith("tensors are equal bit for bit") and status == 0
    again = killed.run_dir.with_name("run-replay")
    first = w.weights(killed.run_dir)
    assert first and all(torch.equal(value, first[name]) for name, value in w.weights(again).items())


def test_steps_up_to_one_are_repeated_and_a_change_is_named(killed: Config, tmp_path: Path) -> None:
    changed = ("--optimizer.lr", "3e-3")
    status, said = repeat(killed, tmp_path / "journal", until=2, name="changed", overrides=changed)
    assert status == 1 and len(said) == 3, said
    assert said[1].startswith("step 1: ") or said[1].startswith("step 2: ")
    assert " was " in said[1] and "not compared" in said[2]
    assert [row["step"] for row in w.records(killed.run_dir.with_name("changed"))] == [1, 2]


def test_a_changed_weight_is_named(killed: Config, tmp_path: Path) -> None:
    folder = killed.run_dir
    (path,) = (folder / "hf").glob("*.safetensors")
    whole = path.read_bytes()
    weights = load_file(path)
    name = sorted(weights)[3]
    weights[name].view(-1).view(torch.int32)[-1] ^= 1
    try:
        save_file(weights, path, metadata={"format": "pt"})
        status, said = repeat(killed, tmp_path / "journal", name="other-weights")
    finally:
        path.write_bytes(whole)
    assert status == 1
    assert said[-1] == f"weights: 1 of {len(weights)} tensors differ, the first: {name}"


@pytest.mark.full
def test_an_engine_repeats_what_depends_on_seeds_and_other_answers_are_named(model: Path, tmp_path: Path) -> None:
    cfg = w.run_config(model, tmp_path / "runs")
    w.attempt(cfg, tmp_path / "journal")
    with pytest.raises(DataError, match=r"no recording of step 1, 2.*rollout\.record=true.*--engine"):
        repeat(cfg, tmp_path / "unused")
    status, said = repeat(cfg, tmp_path / "again", engine=True)
    assert status == 0 and "sampled again" in said[0], said
    status, said = repeat(cfg, tmp_path / "other", engine=True, name="other", overrides=("--seed", "4"))
    assert status == 1 and said[1].startswith("the first decision that differs: step 1: entry 0 of 'asked' was ["), said


def test_another_order_of_arrival_is_no_difference(model: Path, tmp_path: Path) -> None:
    cfg = w.run_config(model, tmp_path / "runs", training={"steps": 1}, evaluation={"every": 0})
    w.attempt(cfg, tmp_path / "journal")
    file = cfg.run_dir / decisions.FILE
    start, step = (json.loads(line) for line in file.read_text().splitlines())
    step["arrived"].reverse()
    assert len(step["arrived"]) > 1
    file.write_text("".join(json.dumps(line) + "\n" for line in (start, step)))
    status, said = repeat(cfg, tmp_path / "again", engine=True)
    assert status == 0 and len(said) == 3, said
    step["arrived"][0][2] = 17  # the version
    file.write_text("".join(json.dumps(line) + "\n" for line in (start, step)))
    status, said = repeat(cfg, tmp_path / "other", engine=True, name="other", overrides=("--optimizer.lr", "0.1"))
    assert status == 1 and "step 1: entry " in said[1] and "17" in said[1], said


def test_steps_that_were_not_taken_are_refused(killed: Config, tmp_path: Path) -> None:
    for until in (0, w.STEPS + 1):
        with pytest.raises(ConfigError, match=rf"--until {until}: .* has taken the steps 1 to {w.STEPS}"):
            repeat(killed, tmp_path / "journal", until=until)


def test_decisions_of_steps_that_were_taken_again_do_not_count(killed: Config) -> None:
    history = decisions.read_history(killed.run_dir)
    assert [after for after, _ in history.starts] == [0, 2] and sorted(history.steps) == list(range(1, w.STEPS + 1))
    lines = [json.loads(line) for line in (killed.run_dir / decisions.FILE).read_text().splitlines()]
    assert [line["step"] for line in lines if "start" not in line].count(3) == 2
    for step, line in history.steps.items():
        kept = [prompt for prompt, verdict, *_ in line["arrived"] if verdict == "kept"]
        assert set(kept) == {prompt for prompt, _ in record.scores(killed.run_dir / record.FOLDER, step)}
        assert [version for _, _, version, _ in line["arrived"]] == [step - 1] * len(line["arrived"])
        assert sorted(prompt for request in line["asked"] for prompt in request) == sorted(
            [prompt for prompt, *_ in line["arrived"]] + line["left"]
        )


def test_decisions_of_a_step_are_void_once_a_start_comes_before_it(tmp_path: Path) -> None:
    asked = decisions.StepDecisions(asked=[[1]])
    for line in (decisions.start_line(0, {}), asked.line(1), asked.line(2), decisions.start_line(1, {})):
        decisions.append(tmp_path, line)
    history = decisions.read_history(tmp_path)
    assert [after for after, _ in history.starts] == [0, 1] and sorted(history.steps) == [1]


def test_parts_are_the_starts_that_compute_differently(killed: Config, tmp_path: Path) -> None:
    tree = plain(killed)
    saves, other = tree | {"checkpoint": tree["checkpoint"] | {"every": 1}, "resume": True}, tree | {"seed": 7}
    for after, config in ((0, tree), (2, saves), (4, other), (3, other), (6, other)):
        decisions.append(tmp_path, decisions.start_line(after, config))
    parts = parts_of(tmp_path, until=6)
    assert [(part.first, part.last, part.config["seed"]) for part in parts] == [(1, 3, 3), (4, 6, 7)]
    with (tmp_path / decisions.FILE).open("a") as file:
        file.write('{"step": 7, "as\n')
    assert decisions.read_history(tmp_path).faults and len(parts_of(tmp_path, until=6)) == 2


def test_a_start_that_is_lost_is_refused_and_one_that_was_cut_off_is_not(tmp_path: Path) -> None:
    begun, step = decisions.start_line(0, {"seed": 1}), decisions.StepDecisions(asked=[[1]]).line(1)
    cut = decisions.start_line(1, {"seed": 2})[:-4]
    for lines, lost in (([begun, step, cut, step], True), ([begun, step, cut, begun, step], False)):
        (tmp_path / decisions.FILE).write_text("\n".join(lines) + "\n")
        history = decisions.read_history(tmp_path)
        assert len(history.faults) == 1 and (history.lost_start is not None) == lost
    (tmp_path / decisions.FILE).write_text("\n".join([begun, step, cut, step]) + "\n")
    with pytest.raises(DataError, match=r"decisions\.jsonl: line 3 cannot be read.*the config of a start is lost"):
        parts_of(tmp_path, until=1)


def test_the_last_group_of_a_prompt_is_the_one_that_is_kept() -> None:
    ids = torch.arange(3)
    one = Rollout(7, ids, ids > 0, torch.zeros(3), 0, "stop")
    taken = decisions.StepDecisions()
    for stale in (True, False, False):
        taken.arrive([one], stale=stale)
    taken.keep({7, 8})
    assert [group[1] for group in taken.arrived] == ["stale", "uniform", "kept"]


def test_a_run_is_not_replaced_by_its_repetition(killed: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name=run: the repetition would replace the run; give it another name with --name"):
        repeat(killed, tmp_path / "journal", name="run", overrides=("--overwrite", "true"))
    assert w.weights(killed.run_dir)


def test_weights_of_another_step_are_not_compared(killed: Config, tmp_path: Path) -> None:
    """A finished run that goes on keeps its export until it ends again."""
    summary = killed.run_dir / "summary.json"
    summary.rename(summary.with_suffix(".former"))
    try:
        status, said = repeat(killed, tmp_path / "journal", name="unfinished")
    finally:
        summary.with_suffix(".former").rename(summary)
    assert status == 0 and said[-1].startswith("weights: not compared"), said


def test_parts_of_a_repetition_can_replace_a_former_one(killed: Config, tmp_path: Path) -> None:
    for _ in range(2):
        status, said = repeat(killed, tmp_path / "journal", name="twice", overrides=("--overwrite", "true"))
        assert status == 0, said
