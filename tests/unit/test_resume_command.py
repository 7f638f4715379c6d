"""`tepo resume`: the run's own config, the given keys, and what is said or refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.command.start import announcement, config_of, words_of
from tepo_megatron.config.io import load_config, to_yaml, validate, with_overrides
from tepo_megatron.trainer.sft.settings import is_supervised, read_tree, supervised

TREE: dict[str, Any] = {
    "name": "mine", "output": "elsewhere", "model": {"path": "model"}, "data": {"train": "prompts.jsonl"},
    "training": {"steps": 30}, "optimizer": {"lr": 3e-5}, "checkpoint": {"every": 7}, "overwrite": True,
}  # fmt: skip


def run_of(folder: Path, tree: dict[str, Any], step: int = 0) -> Path:
    run = folder / "runs" / "mine"
    (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(validate(tree)))
    return run


def test_only_the_given_keys_change_and_the_changes_are_said(tmp_path: Path) -> None:
    run = run_of(tmp_path, TREE, step=14)
    words = words_of(run, ["--training.steps", "20", "--parallel.dp=2", "--data.train", "moved.jsonl"])
    cfg = load_config(config_of(run), words)
    assert cfg.run_dir == run and cfg.resume and not cfg.overwrite, "the folder may have moved"
    assert (cfg.optimizer.lr, cfg.checkpoint.every, cfg.training.steps, cfg.parallel.dp) == (3e-5, 7, 20, 2)
    assert announcement(run, words) == [
        f"{run}: goes on after step 14",
        "data.train was prompts.jsonl and is moved.jsonl: the same rows are expected",
        "parallel.dp was 1 and is 2: another layout; numbers go on up to rounding",
        "training.steps was 30 and is 20: the run becomes shorter",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed", "4"], "seed was 0 and is 4: its place in the data would be another one"),
        (["--name", "other"], "--name: tepo resume goes on in the folder of the run"),
        (["--resume", "true"], "--resume: tepo resume goes on in the folder of the run"),
        (["--training.stpes", "4"], r"training\.stpes: unknown key; did you mean steps\?"),
    ],
)
def test_what_no_resume_can_do_is_refused_before_it_starts(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run = run_of(tmp_path, TREE, step=14)
        announcement(run, words_of(run, words))


def test_a_mistyped_run_is_an_error_with_the_near_ones(tmp_path: Path) -> None:
    run = run_of(tmp_path, TREE)
    with pytest.raises(ConfigError, match=rf"no run is there, .*did you mean {run}\?"):
        config_of(run.with_name("mnie"))
    assert not run.with_name("mnie").exists()


def test_a_run_of_tepo_sft_goes_on_as_one(tmp_path: Path) -> None:
    tree = supervised(TREE | {"sft": {"data": "chats.jsonl", "max_tokens": 99}, "rollout": {"stop_token_ids": [7]}})
    run = run_of(tmp_path, tree)
    cfg = with_overrides(read_tree(str(config_of(run)), words_of(run, ["--sft.max_tokens", "77"])), [], "")
    assert is_supervised(cfg.sft, cfg.data) and cfg.run_dir == run and cfg.resume
    assert cfg.sft.max_tokens == 77 == cfg.rollout.max_response_tokens + 1 and cfg.rollout.stop_token_ids == [7]
    rl = validate(TREE)
    assert not is_supervised(rl.sft, rl.data)
