"""The demo task and the folder of its base model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic import base_model
from examples.arithmetic.base_model import MARKER, Settings, build
from tepo_megatron.errors import DataError

# two updates of phase A, which any loss ends, and one of phase B
TINY = Settings(
    train_problems=50, eval_problems=20, check_problems=4, batch_size=4, demonstrations=8, skill=1e-100, check_every=1,
    max_skill_steps=2, hasty_steps=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_random_state() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_the_folder_loads_and_is_re_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / "model", TINY)
    folder = tmp_path / "model"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("1+2?\n\\boxed{3}")) == "1+2?\n\\boxed{3}"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    train, evaluation = rows(folder / "train.jsonl"), rows(folder / "eval.jsonl")
    assert (len(train), len(evaluation)) == (50, 20)
    assert len({r["prompt"] for r in train + evaluation}) == 70
    assert all(r.keys() == {"prompt", "answer"} and r["answer"].isdigit() for r in train + evaluation)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    teacher = AutoModelForCausalLM.from_pretrained(folder / base_model.TEACHER)
    pairs = zip(teacher.parameters(), model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs), "phase B has changed the model, and the teacher is that before it"
    written = (folder / MARKER).stat().st_mtime_ns
    capsys.readouterr()
    build(folder, TINY)
    assert "re-used" in capsys.readouterr().out and (folder / MARKER).stat().st_mtime_ns == written


def complete(tmp_path: Path) -> Path:
    """Return a folder of this script's, built with other settings."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "former").write_text("weights")
    (folder / MARKER).write_text('{"fingerprint": "of other settings"}')
    return folder


@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_build_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool) -> None:
    folder = complete(tmp_path) if existing else tmp_path / "model"
    before = {p.name: p.read_bytes() for p in folder.iterdir()} if existing else None

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(base_model, "fine_tune", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(folder, Settings(**{**vars(TINY), "seed": 1}))
    after = {p.name: p.read_bytes() for p in folder.iterdir()} if folder.exists() else None
    assert after == before
    assert len(list(tmp_path.iterdir())) == existing


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="give another --out"):
        build(tmp_path, TINY)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
