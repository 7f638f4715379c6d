"""The data of the example of the reward `code`: programs that are right or have one fault, and tests that tell them apart."""

import json
import random
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.arithmetic import task
from examples.code import programs
from tepo_megatron.errors import DataError


def test_a_wrong_program_has_one_character_changed() -> None:
    rng = random.Random(0)
    for _ in range(200):
        expression = task.make_problem(rng).prompt.rstrip("?\n")
        wrong = programs.wrong_expression(rng, expression)
        assert len(wrong) == len(expression) and sum(a != b for a, b in zip(wrong, expression, strict=True)) == 1
        assert all((a in "+-") == (b in "+-") for a, b in zip(wrong, expression, strict=True))


def test_the_folder_has_a_model_that_can_write_programs(tmp_path: Path) -> None:
    base = tmp_path / "base"
    task.build_tokenizer().save_pretrained(base)
    (base / "train.jsonl").write_text("of the demo")
    out = tmp_path / "code"
    for _ in range(2):  # the second replaces the first
        assert programs.main(["--base", str(base), "--out", str(out)]) == 0
    assert not (out / "model" / "train.jsonl").exists()
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    text = "9+5-7?\n" + programs.program("9+5-7")
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids and len(ids) == 18
    rows = {name: [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "eval")}
    prompts = {name: {row["prompt"] for row in found} for name, found in rows.items()}
    shown = [json.loads(line) for line in (out / "demonstrations.jsonl").read_text().splitlines()]
    assert not prompts["train"] & prompts["eval"] and not prompts["eval"] & {row["prompt"] for row in shown}
    right = [row["response"] == programs.program(row["prompt"].rstrip("?\n")) for row in shown]
    assert sum(right) / len(right) == pytest.approx(1 - programs.WRONG, abs=0.03)
    shutil.copy(out / "model" / "tokenizer.json", base / "tokenizer.json")
    with pytest.raises(DataError, match="is it the demo's base model"):
        programs.main(["--base", str(base), "--out", str(out)])
