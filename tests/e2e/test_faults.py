"""Bad input and faults at the command line: one clear error, a non-zero exit of every rank, nothing left behind.

It takes less than 30 s on a machine with nothing else to do, and several times that on a busy one, hence the bound here. None
of these needs a server (those that do: tests/server, test_train.py); those in mid-run have a scripted engine instead.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.recorded import step_records, steps_taken
from tests.tiny import tiny_qwen3

pytestmark = pytest.mark.e2e
BOUND = 60.0  # seconds: less than the time-out of a collective, for which a rank that nobody ends would wait


def refused(command, *phrases: str) -> None:
    assert command.wait(BOUND) == 1, command.output
    for phrase in phrases:
        assert phrase in command.output, command.output
    assert command.output.count("tepo: error:") == 1 and "Traceback" not in command.output, command.output
    command.assert_nothing_left()


def test_refused_before_any_process_starts(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    phrase = "parallel.tp=4 does not divide num_query_groups=2; use 1 or 2"
    refused(tepo(*arguments(random_model, parallel__tp=4)), phrase)
    assert not (tmp_path / "runs").exists()


def test_a_truncated_checkpoint_is_refused(tepo, arguments, tmp_path: Path) -> None:
    path = tmp_path / "model"
    tiny_qwen3(path, layers=4)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(tepo(*arguments(path)), f"{weights}: truncated or corrupt")


@pytest.mark.full
def test_cuda_without_a_gpu(tepo, arguments, random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on a machine with GPUs too
    refused(tepo(*arguments(random_model, platform="cuda")), "platform")


SHORT = {
    "training__steps": 6, "training__epochs": 2, "training__minibatch_prompts": 4, "rollout__prompts_per_step": 8,
    "rollout__samples_per_prompt": 4, "optimizer__warmup_steps": 0, "evaluation__max_problems": 8,
}  # fmt: skip


def fault(command, run: Path, *phrases: str, steps: int) -> None:
    """Assert that the fault ends the run in mid-run as in `refused`, with earlier steps on record and no partial files."""
    command.until(lambda: "actor built" in command.output, timeout=BOUND)
    refused(command, *phrases)
    assert len(step_records(run)) == steps
    assert not (run / "hf").exists() and not (run / "summary.json").exists()
    assert "error: rank" in (run / "log.txt").read_text()


@pytest.mark.full
def test_steps_without_an_informative_group_change_nothing_and_go_on(
    tepo, arguments, random_model: Path, tmp_path: Path
) -> None:
    command = tepo(*arguments(random_model, **SHORT, name="uniform"), engine="uniform")
    assert command.wait(2 * BOUND) == 0, command.output
    records = step_records(tmp_path / "runs" / "uniform")
    assert len(records) == 6 and all(r["rollout/kept_groups"] == 0 and r["loss/total"] is None for r in records)
    trained, base = (
        load_file(path)
        for path in (next((tmp_path / "runs/uniform/hf").glob("*.safetensors")), random_model / "model.safetensors")
    )
    assert all(torch.equal(trained[name], base[name]) for name in base)


@pytest.mark.full
def test_a_loss_that_is_not_a_number_ends_the_run(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    command = tepo(*arguments(random_model, **SHORT, optimizer__lr="1e30", name="nan"), engine="good")
    fault(command, tmp_path / "runs" / "nan", "is nan in step 1, update 1", "optimizer.lr", steps=0)


@pytest.mark.full
def test_a_server_that_dies_in_mid_run_ends_the_run(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    command = tepo(*arguments(random_model, **SHORT, name="dies"), engine="dies")
    fault(command, tmp_path / "runs" / "dies", "inference server was killed by SIGKILL", steps=1)


@pytest.mark.full
def test_a_killed_rank_ends_the_run(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    command = tepo(*arguments(random_model, **SHORT | {"training__steps": 500}, name="killed"), engine="slow")
    run = tmp_path / "runs" / "killed"
    command.until(lambda: steps_taken(run) >= 2, timeout=BOUND)
    os.kill(command.ranks()[-1], signal.SIGKILL)
    refused(command, "was ended by SIGKILL")
    assert len(step_records(run)) >= 2


@pytest.mark.full
def test_ctrl_c_ends_the_run(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    command = tepo(*arguments(random_model, **SHORT | {"training__steps": 500}, name="stopped"), engine="slow")
    run = tmp_path / "runs" / "stopped"
    command.until(lambda: steps_taken(run) >= 2, timeout=BOUND)
    command.interrupt()
    assert command.wait(BOUND) == 130
    command.assert_nothing_left()
    assert len(step_records(run)) >= 2 and not (run / "hf").exists() and not (run / "summary.json").exists()
    assert "Traceback" not in command.output and "tepo: interrupted" in command.output


@pytest.mark.full
def test_a_start_that_was_refused_does_not_block_its_name(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    refused(tepo(*arguments(random_model, data__train=tmp_path / "missing.jsonl", name="again")), "missing.jsonl")
    command = tepo(*arguments(random_model, **SHORT | {"training__steps": 1}, name="again"), engine="good")
    assert command.wait(2 * BOUND) == 0, command.output
    refused(tepo(*arguments(random_model, name="again")), "holds a run already")
