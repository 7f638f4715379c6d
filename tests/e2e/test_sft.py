"""The real command fine-tunes a model, restarts ranks that die, and resumes; the result is a model that servers load."""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic import task
from examples.arithmetic.base_model import build_model
from tests.e2e.conftest import Command
from tests.recorded import step_records, steps_taken

pytestmark = pytest.mark.e2e
BOUND = 120.0
STEPS = 24


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model, worked solutions to learn from, and a config that is meant for RL as well."""
    folder = tmp_path_factory.mktemp("sft")
    torch.manual_seed(0)
    tokenizer, dice = task.build_tokenizer(), random.Random(0)
    build_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, count in (("train", 16 * STEPS), ("eval", 32)):
        problems = [task.make_problem(dice, 2) for _ in range(count)]
        rows = [{"prompt": p.prompt, "response": task.hasty_demonstration(dice, p, 0.0)} for p in problems]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "name": "warm", "platform": "cpu", "model": {"path": str(folder / "model"), "precision": "fp32"},
        "parallel": {"dp": 2}, "optimizer": {"lr": 2e-3, "warmup_steps": 5}, "rollout": {"max_response_tokens": 48},
        "training": {"max_tokens_per_microbatch": 4096}, "checkpoint": {"every": 4},
        "sft": {
            "data": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_tokens": 128, "batch_sequences": 16,
        },
    }  # fmt: skip
    (folder / "mine.yaml").write_text(json.dumps(keys))
    return folder


def check(run: Path, files: Path) -> None:
    """Assert that all updates were taken once, the model is learned, and transformers measures the loss that was reported."""
    rows = step_records(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    losses = json.loads((run / "summary.json").read_text())["held_out_loss"]
    assert losses["after"] < 0.6 * losses["before"]
    model, tokenizer = (kind.from_pretrained(run / "hf") for kind in (AutoModelForCausalLM, AutoTokenizer))
    total, tokens = 0.0, 0
    for line in (files / "eval.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, response = (tokenizer(row[key], add_special_tokens=False).input_ids for key in ("prompt", "response"))
        ids = torch.tensor([*prompt, *response, tokenizer.eos_token_id])
        with torch.no_grad():
            logits = model.double()(ids[None]).logits[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[len(prompt) :], reduction="sum"))
        tokens += len(response) + 1
    assert total / tokens == pytest.approx(losses["after"], rel=1e-5)


def test_the_command_learns_and_restarts_a_killed_rank(tepo: Callable[..., Command], files: Path, tmp_path: Path) -> None:
    run, command = tmp_path / "warm", tepo("sft", files / "mine.yaml", "--output", str(tmp_path))
    command.until(lambda: steps_taken(run) >= 6, timeout=BOUND)
    ranks = sorted(child.pid for child in psutil.Process(command.process.pid).children())
    os.kill(ranks[-1], signal.SIGKILL)
    assert command.wait(2 * BOUND) == 0, command.output
    assert "the ranks are restarted from the checkpoint of step" in command.output and f"{run / 'hf'}" in command.output
    check(run, files)
    command.assert_nothing_left()


@pytest.mark.full
def test_sigterm_saves_and_a_resume_goes_on(tepo: Callable[..., Command], files: Path, tmp_path: Path) -> None:
    words = ["sft", files / "mine.yaml", "--output", str(tmp_path), "--parallel.dp", "1"]
    run, command = tmp_path / "warm", tepo(*words)
    command.until(lambda: steps_taken(run) >= 5, timeout=BOUND)
    os.kill(command.process.pid, signal.SIGTERM)
    assert command.wait(BOUND) == os.EX_TEMPFAIL, command.output
    assert "saved; go on with tepo resume" in command.output
    refused = tepo(*words)
    assert refused.wait(BOUND) == 1 and "holds a run already" in refused.output
    again = tepo("resume", run, "--parallel.dp", "2")
    assert again.wait(2 * BOUND) == 0, again.output
    assert "resume: from the checkpoint of update" in again.output
    check(run, files)
