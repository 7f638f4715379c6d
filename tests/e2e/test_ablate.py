"""`tepo ablate` as a user runs it, with a scripted engine in vLLM's place."""

import json
from pathlib import Path

import pytest
import yaml

from tepo_megatron.evaluation import read_evaluation
from tests.e2e.conftest import write_model

pytestmark = pytest.mark.e2e

RUNS = {"tepo": None, "grpo": None, "exploding": {"objective": {"name": "grpo"}, "optimizer": {"lr": 1e30}}}


@pytest.mark.full
def test_an_ablation_compares_two_objectives_and_reports_a_failed_run(tepo, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", problems=16)
    base = {
        "name": "base", "platform": "cpu", "model": {"path": str(model), "precision": "fp32"}, "parallel": {"tp": 1},
        "data": {"train": str(model / "train.jsonl"), "eval": str(model / "eval.jsonl"), "max_prompt_tokens": 16},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 48},
        "training": {"epochs": 1, "minibatch_prompts": 4, "max_tokens_per_microbatch": 1024},
    }  # fmt: skip
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    file = {"name": "ab", "base": "base.yaml", "runs": RUNS, "seeds": [0], "baseline": "grpo", "output": str(tmp_path)}
    (tmp_path / "ab.yaml").write_text(yaml.safe_dump(file, sort_keys=False))

    command = tepo("ablate", tmp_path / "ab.yaml", "--training.steps", "2", "--export_hf", "false", engine="good")
    assert command.wait(300) == 1, command.output
    command.assert_nothing_left()
    assert "Traceback" not in command.output
    folder = tmp_path / "ab"
    table = {row["name"]: row for row in json.loads((folder / "ablation.json").read_text())["rows"]}
    assert list(table) == list(RUNS)
    assert table["tepo"]["errors"] == table["grpo"]["errors"] == {} and "is nan" in table["exploding"]["errors"]["0"]
    assert "seed 0 failed: rank 0: " in " ".join(command.output.split())
    for name in ("tepo", "grpo"):
        scores = read_evaluation(folder / f"{name}-seed0")
        assert list(scores.after) == list(range(16)) and set(scores.after.values()) <= {0.0, 1.0}
        assert table[name]["after"]["mean"] == sum(scores.after.values()) / 16
        assert (
            json.loads((folder / f"{name}-seed0" / "summary.json").read_text())["accuracy_after"]
            == table[name]["after"]["mean"]
        )
    assert table["tepo"]["difference"]["mean"] == 0  # the scripted answers depend on the seed alone
    assert "within noise" in (folder / "ablation.md").read_text()
