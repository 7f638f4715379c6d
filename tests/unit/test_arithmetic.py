"""The demo task and the folder of its base model."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic import base_model, task
from examples.arithmetic.base_model import MARKER, Settings, build
from tepo_megatron.errors import DataError, TepoError

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


def test_solutions_work_every_step_within_the_bounds() -> None:
    rng = random.Random(0)
    lengths = set()
    for _ in range(2000):
        problem = task.make_problem(rng)
        chain = problem.prompt.removesuffix("?\n")
        assert re.fullmatch(r"\d([+-][1-9]){2,4}", chain)
        assert eval(chain) == problem.answer
        equations = re.findall(r"(\d+[+-]\d)=(?=(\d+))", problem.solution)
        assert all(eval(left) == int(right) and 0 <= int(right) <= 20 for left, right in equations)
        lengths.add(len(equations))
        assert task.boxed_answer(problem.solution) == str(problem.answer)
    assert lengths == {2, 3, 4}


def test_longer_problems_are_drawn_where_the_settings_ask_for_them() -> None:
    made = base_model.demonstrations(random.Random(0), Settings(max_operations=8), 300, 0.0, frozenset())
    assert {len(re.findall("[+-]", row["prompt"])) for row in made} == set(range(2, 9))
    problems = task.distinct_problems(random.Random(0), 300, operations=range(8, 9))
    assert max(len(p.solution) - len(task.BOX) + 1 for p in problems) < base_model.MAX_RESPONSE_TOKENS
    held_out = frozenset(row["prompt"] for row in made[:100])
    again = base_model.demonstrations(random.Random(0), Settings(max_operations=8), 200, 0.5, held_out)
    assert not held_out & {row["prompt"] for row in again}


def test_hasty_demonstrations_guess_without_work_in_the_share_asked_for() -> None:
    rng = random.Random(0)
    problem = task.make_problem(rng)
    targets = [task.hasty_demonstration(rng, problem, 0.65) for _ in range(2000)]
    guesses = [t for t in targets if t != problem.solution]
    assert len(guesses) / len(targets) == pytest.approx(0.65, abs=0.04)
    answers = {int(task.boxed_answer(guess) or -1) for guess in guesses}
    assert all(abs(a - problem.answer) <= task.LARGEST_GUESS_ERROR and a >= 0 for a in answers)
    assert len(answers) > 3


def test_problems_are_distinct_and_avoid_those_taken() -> None:
    first = task.distinct_problems(random.Random(0), 300)
    prompts = {p.prompt for p in first}
    second = task.distinct_problems(random.Random(0), 300, taken=prompts)
    assert len(prompts) == 300
    assert len({p.prompt for p in second} | prompts) == 600


@pytest.mark.parametrize(
    ("text", "answer"),
    [("\\boxed{1}.\\boxed{12}", "12"), ("12", None), ("\\boxed{12", None), ("}", None), ("\\boxed{}", "")],
)
def test_the_last_closed_box_counts(text: str, answer: str | None) -> None:
    assert task.boxed_answer(text) == answer


def test_the_tokenizer_is_lossless_with_one_token_for_the_box() -> None:
    tokenizer = task.build_tokenizer()
    assert len(tokenizer) == task.VOCABULARY_SIZE == 64
    for problem in task.distinct_problems(random.Random(0), 200):
        text = problem.prompt + problem.solution
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) == len(text) - len(task.BOX) + 1
        assert tokenizer.unk_token_id not in ids


@pytest.mark.parametrize(("kind", "size"), [("qwen3", 599_104), ("qwen3_5", 652_304)])
def test_the_model_has_its_advertised_size(kind: str, size: int) -> None:
    model = base_model.build_model(task.build_tokenizer(), kind)
    assert model.num_parameters() == size
    assert {p.dtype for p in model.parameters()} == {torch.float32}


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


@pytest.mark.full
def test_the_seed_alone_decides(tmp_path: Path) -> None:
    other = Settings(**{**vars(TINY), "seed": 1})
    for name, settings in (("a", TINY), ("b", TINY), ("c", other)):
        build(tmp_path / name, settings)

    def content(name: str, pattern: str) -> bytes:
        (file,) = (tmp_path / name).glob(pattern)
        return file.read_bytes()

    for file in ("*.safetensors", "train.jsonl"):
        assert content("a", file) == content("b", file) != content("c", file)
    assert content("a", "eval.jsonl") == content("c", "eval.jsonl")  # runs of all seeds are compared on it


@pytest.mark.full
def test_another_setting_rebuilds_the_folder(tmp_path: Path) -> None:
    folder = complete(tmp_path)
    build(folder, Settings(**{**vars(TINY), "train_problems": 10}))
    assert len(rows(folder / "train.jsonl")) == 10 and not (folder / "former").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


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


@pytest.mark.full
def test_a_skill_that_is_never_reached_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TepoError, match="choose another --seed"):
        build(tmp_path / "model", Settings(**{**vars(TINY), "skill": 0.999}))
    assert not list(tmp_path.iterdir())
