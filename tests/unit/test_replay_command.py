"""`tepo replay`: a run comes out again bit for bit, and what differs is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.command.replay import ReplayRequest, replay
from tepo_megatron.config import Config
from tepo_megatron.rollout import decisions
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
        w.attempt(cfg, folder / "journal", 0, Kill("tepo_megatron.monitor.sinks:RunLog.write", step=3))
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


@pytest.mark.parametrize(
    ("objective", "log_probs"), [("grpo", "later log-probs"), ("grpo_without_truncated", "log-probs"), ("steer", "log-probs")]
)
def test_another_objective_is_compared_where_it_changes_nothing(
    killed: Config, tmp_path: Path, objective: str, log_probs: str
) -> None:
    """Its weights leave those that sampled, far beyond the gate's limit, and it has no use for the run's objective.beta."""
    name, _, more = objective.partition("_")
    parts = ("--objective.mask_truncated", "true") if more else ()
    changed = ("--objective.name", name, *parts, "--sync.max_logprob_diff", "1e-7")
    status, said = repeat(killed, tmp_path / "journal", name=objective, overrides=changed)
    assert said[1] == f"the objective is {name} and was tepo; what the run replaces in tepo is left out: beta=0.1"
    *_, compared, left_out = said
    assert (status, compared) == (0, f"every number of the rollouts and rewards of the steps 1 to {w.STEPS} is equal"), said
    assert (
        left_out == f"the objective is {name} and was tepo: not compared are losses, gradients, ratios, weights and {log_probs}"
    )
    rows = w.records(killed.run_dir.with_name(objective))
    assert [row["step"] for row in rows] == list(range(1, w.STEPS + 1)) and rows[-1]["gate/logprob_diff_mean"] > 1e-6


def test_another_reward_is_named_under_another_objective(killed: Config, tmp_path: Path) -> None:
    path = killed.run_dir / "metrics.jsonl"
    whole = path.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    (row,) = (row for row in rows if row["step"] == 3 and "reward/mean" in row)
    row["reward/mean"] += 1
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        status, said = repeat(killed, tmp_path / "journal", name="other-reward", overrides=("--objective.name", "gspo"))
    finally:
        path.write_text(whole)
    assert status == 1 and said[-2].startswith(f"step 3: reward/mean was {row['reward/mean']} and is "), said


@pytest.mark.slow
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


def test_steps_that_were_not_taken_are_refused(killed: Config, tmp_path: Path) -> None:
    for until in (0, w.STEPS + 1):
        with pytest.raises(ConfigError, match=rf"--until {until}: .* has taken the steps 1 to {w.STEPS}"):
            repeat(killed, tmp_path / "journal", until=until)


def test_decisions_of_a_step_are_void_once_a_start_comes_before_it(tmp_path: Path) -> None:
    asked = decisions.StepDecisions(asked=[[1]])
    for line in (decisions.start_line(0, {}), asked.line(1), asked.line(2), decisions.start_line(1, {})):
        decisions.append(tmp_path, line)
    history = decisions.read_history(tmp_path)
    assert [after for after, _ in history.starts] == [0, 1] and sorted(history.steps) == [1]


def test_a_run_is_not_replaced_by_its_repetition(killed: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name=run: the repetition would replace the run; give it another name with --name"):
        repeat(killed, tmp_path / "journal", name="run", overrides=("--overwrite", "true"))
    assert w.weights(killed.run_dir)
