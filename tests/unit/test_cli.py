"""The command refuses before it starts anything, and removes only what it may remove."""

import json
from pathlib import Path

import pytest

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.command import parsers
from tepo_megatron.command import start as checking
from tepo_megatron.command import start as starting
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config, to_yaml, validate
from tepo_megatron.monitor import run_dir
from tests.tiny import tiny_qwen3


def config(folder: Path, **change: object) -> Config:
    return validate({"name": "a", "model": {"path": "m"}, "data": {"train": "t"}, "output": str(folder), **change})


def test_a_start_that_failed_leaves_the_name_free(tmp_path: Path) -> None:
    for _ in range(2):
        path = run_dir.prepare(config(tmp_path))
        (tmp_path / "a" / "metrics.jsonl").touch()
        (tmp_path / "a" / "log.txt").write_text("error: ...")
    assert load_config(path).name == "a"


@pytest.mark.parametrize("key", ["model", "data"])
def test_what_the_run_needs_is_not_removed(tmp_path: Path, key: str) -> None:
    used = tmp_path / "a" / "hf"
    used.mkdir(parents=True)
    section = {"path": str(used)} if key == "model" else {"train": str(used / "train.jsonl")}
    with pytest.raises(ConfigError, match="lies in the run that would be replaced"):
        run_dir.prepare(config(tmp_path, overwrite=True, **{key: section}))
    assert used.exists()


def test_malformed_words_and_files_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good.yaml"
    good.write_text("name: a")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: \xff\xfe")
    for words, phrase in (
        (["train", str(good), "--optimizer.lr", "["], "--optimizer.lr: '[' is not a YAML value"),
        (["train", str(binary)], "binary.yaml: not valid YAML"),
        (["report", str(tmp_path), "--steps", "3"], "takes no --steps"),
    ):
        assert parsers.main(words) == 1
        assert phrase in capsys.readouterr().err


@pytest.mark.slow
def test_the_resume_of_a_finished_run_tells_its_results_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "a"
    (run / "hf").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config(tmp_path, training={"steps": 3})))
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    monkeypatch.setattr(starting, "start", lambda cfg: pytest.fail("it was started"))
    monkeypatch.setattr(checking, "preflight", lambda cfg: pytest.fail("it was about to start"))
    words = ["train", str(run / "config.yaml"), "--resume", "true"]
    summary = {"accuracy_before": None, "accuracy_after": None, "standard_error": {"before": None, "after": None}}
    (run / "summary.json").write_text(json.dumps(summary | {"steps": 3, "seconds": 1.0}))
    assert parsers.main(words) == 0
    output = capsys.readouterr().out
    assert f"{run}: this run is finished, with 3 steps; its results: summary.json, report.html, report.png, hf" in output
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG"), "a kill came before the picture"
    assert parsers.main([*words, "--training.steps", "2"]) == 1
    assert "ended at step 3" in capsys.readouterr().err


def test_an_evaluation_is_graded_by_a_function_named_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_qwen3(tmp_path / "model", layers=1)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = ["evaluate", str(tmp_path / "model"), "--data", str(tmp_path / "mine.jsonl"), "--platform", "cpu"]
    words += ["--data.max_prompt_tokens", "8", "--rollout.max_response_tokens", "8", "--out", str(tmp_path / "out")]
    assert parsers.main([*words, "--reward", f"{tmp_path}/none.py:fn"]) == 1
    assert f"function={tmp_path}/none.py:fn: there is no file" in capsys.readouterr().err
