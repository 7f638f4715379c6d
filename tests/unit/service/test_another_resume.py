"""A resumed `tepo train` with something else on which its place in the data depends is refused, by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tepo_megatron.base.errors import DataError
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.data import PromptStream, load_data, load_tokenizer
from tepo_megatron.service.opening import open_driver
from tests.e2e.scripted_service import ScriptedEngine
from tests.tiny import tiny_qwen3


def config(model: Path, output: Path) -> Config:
    return validate({
        "name": "run", "output": str(output), "platform": "cpu", "model": {"path": str(model), "precision": "fp32"},
        "data": {"train": str(model / "train.jsonl"), "max_prompt_tokens": 16},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 2, "max_response_tokens": 16},
        "training": {"minibatch_prompts": 4, "max_tokens_per_microbatch": 64},
    })  # fmt: skip


def set_key(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


@pytest.mark.parametrize(
    "name",
    [
        "seed",
        "rollout.prompts_per_step",
        "model.path: the tokenizer",
        "model.path: the chat template",
        "fingerprint",
        "shuffle",
    ],
)
def test_a_resume_with_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TEPO_TEST_ENGINE", "good")
    model = tmp_path / "model"
    tiny_qwen3(model, layers=1)
    rows = [json.dumps({"prompt": f"1+{i}?", "answer": str(1 + i)}) + "\n" for i in range(20)]
    (model / "train.jsonl").write_text("".join(rows))
    cfg = config(model, tmp_path)
    cfg.run_dir.mkdir()
    with open_driver(cfg, ScriptedEngine) as driver:
        driver.resume(None)
        data = load_data(cfg.data, cfg.reward, load_tokenizer(model))
        place = PromptStream.mixed(data.train, cfg.seed, cfg.data.shuffle).state_dict()
        state = json.loads(json.dumps(driver.state(0) | {"prompts": place}))
    with open_driver(cfg, ScriptedEngine) as driver:
        driver.resume(state)
    match name:
        case "seed":
            cfg = replace(cfg, seed=77)
        case "rollout.prompts_per_step":
            cfg = replace(cfg, rollout=replace(cfg.rollout, prompts_per_step=4))
        case "model.path: the tokenizer":
            tree = json.loads((model / "tokenizer.json").read_text())
            tree["added_tokens"][0]["lstrip"] = True
            (model / "tokenizer.json").write_text(json.dumps(tree))
        case "model.path: the chat template":
            set_key(model / "tokenizer_config.json", "chat_template", "{{ messages[0].content }}")
        case "fingerprint":
            (model / "train.jsonl").write_text("".join(reversed(rows)))
        case "shuffle":
            cfg = replace(cfg, data=replace(cfg.data, shuffle=not cfg.data.shuffle))
    with open_driver(cfg, ScriptedEngine) as driver, pytest.raises(DataError, match=f"{name} was .* and is "):
        driver.resume(state)
