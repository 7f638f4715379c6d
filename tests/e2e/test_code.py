"""The example of the reward `code`: a model learns to write programs by `tepo sft`, and is trained on what their tests say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.code import programs
from tests.e2e.conftest import Command

pytestmark = [
    pytest.mark.server,
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bwrap (Debian: apt-get install bubblewrap)"),
]
STEPS = 3
KEYS = {
    "training.steps": STEPS, "rollout.prompts_per_step": 8, "training.minibatch_prompts": 4, "evaluation.max_problems": 8,
    "rollout.filter_uniform_groups": "false", "rollout.record": "true", "reward.workers": 2,
}  # fmt: skip


def test_a_model_is_trained_on_the_tests_of_its_programs(tepo: Callable[..., Command], base: Path, tmp_path: Path) -> None:
    data, output = tmp_path / "data", ["--output", tmp_path / "runs"]
    assert programs.main(["--base", str(base), "--out", str(data)]) == 0
    config = "examples/code/code.yaml"
    words = ["--model.path", data / "model", "--sft.data", data / "demonstrations.jsonl", "--optimizer.lr", "1e-3"]
    learned = tepo("sft", config, *output, "--name", "model", *words, "--sft.steps", "100")
    assert learned.wait(240) == 0, learned.output
    paths = {"model.path": tmp_path / "runs/model/hf"} | {f"data.{name}": data / f"{name}.jsonl" for name in ("train", "eval")}
    words = [str(word) for key, value in (KEYS | paths).items() for word in (f"--{key}", value)]
    trained = tepo("train", config, *output, "--name", "code", *words)
    assert trained.wait(300) == 0, trained.output
    trained.assert_nothing_left()
    run = tmp_path / "runs" / "code"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record["rollout/logprob_diff_mean"] <= 1e-5 for record in records)
    assert 0 < sum(record["accuracy/mean"] for record in records) < STEPS  # some programs are right, and some are wrong
