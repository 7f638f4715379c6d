"""The seven benchmarks: their entries, rows as prompts, samples on disk, results by hand, the paper's rows."""

import csv
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any, get_args

import datasets
import pytest

from tepo_megatron import config
from tepo_megatron.base.errors import DataError
from tepo_megatron.config import EvaluationConfig
from tepo_megatron.evaluation.benchmarks import BENCHMARKS, COLUMNS, MODELS, PUBLISHED, load_benchmarks
from tepo_megatron.evaluation.results import NOTHING, compare, figures, over_benchmarks, over_samples, result
from tepo_megatron.evaluation.samples import BenchmarkSample, read_samples, to_lines
from tests.tiny import char_tokenizer

STAND_INS = Path("tests/problems")
TOKENIZER = char_tokenizer()


def settings(**fields: Any) -> EvaluationConfig:
    return EvaluationConfig(**{"benchmarks": list(BENCHMARKS), "benchmark_folder": str(STAND_INS)} | fields)


def sample(problem: int, k: int, right: bool, **fields: Any) -> BenchmarkSample:
    made = BenchmarkSample(
        problem, k, float(right), "exact" if right else "wrong", "1" if right else "2", "1", 10, "stop", "..."
    )
    return dataclasses.replace(made, **fields)


def test_there_is_one_entry_for_each_benchmark_with_the_papers_protocol() -> None:
    assert set(BENCHMARKS) == set(get_args(config.Benchmark)) == set(COLUMNS)
    sampled = {name for name, entry in BENCHMARKS.items() if (entry.samples, entry.temperature) == (32, 0.6)}
    greedy = {name for name, entry in BENCHMARKS.items() if (entry.samples, entry.temperature) == (1, 0.0)}
    assert sampled == {"aime24", "aime25", "amc"} and greedy == set(BENCHMARKS) - sampled
    assert EvaluationConfig().benchmark_tokens == 8192


def test_rows_of_every_schema_become_prompts() -> None:
    found = {p.name: p for p in load_benchmarks(settings(), TOKENIZER, 400)}
    assert list(found) == list(BENCHMARKS)
    for name, problems in found.items():
        rows = [json.loads(line) for line in (STAND_INS / f"{name}.jsonl").read_text().splitlines()]
        assert [p.id for p in problems.prompts] == list(range(len(rows)))
        for prompt, row in zip(problems.prompts, rows, strict=True):
            chain = row.get("problem") or row.get("question")
            assert TOKENIZER.decode(prompt.token_ids).startswith(chain + "\n\n")
            assert TOKENIZER.decode(prompt.token_ids).endswith("\\boxed{}.")
            assert prompt.answer == str(eval(chain.rstrip("?")))  # also of 9.0, "$2$" and ["$2$"]
        assert problems.changes == (f"{len(rows)} problems instead of {problems.entry.problems}",)
    assert found["amc"].sampling((2,)) == dataclasses.replace(
        found["math500"].sampling((2,)), samples=32, temperature=0.6, max_tokens=8192
    )


def test_a_chat_model_gets_a_users_message() -> None:
    chat = char_tokenizer()
    chat.chat_template = "{% for m in messages %}{{ m['role'] }} ({{ m['content'] }}) {% endfor %}"
    (problems,) = load_benchmarks(settings(benchmarks=["minerva"], benchmark_prompt="<problem>\n"), chat, 64)
    assert chat.decode(problems.prompts[0].token_ids) == "user (2+2?\n) "
    assert problems.prompts[0].messages == [{"role": "user", "content": "2+2?\n"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1+1?"}, r"minerva\.jsonl:2: field 'answer' is missing \(found: 'question'\); rename it"),
        ({"question": " ", "answer": "2"}, r"minerva\.jsonl:2: field 'question' holds no text"),
        ({"question": "1+1?", "answer": None}, r"minerva\.jsonl:2: field 'answer' is None, no answer"),
        ({"question": "1+1?", "answer": []}, r"minerva\.jsonl:2: field 'answer' is \[\], no answer"),
        ({"question": "1+1?", "answer": True}, r"minerva\.jsonl:2: field 'answer' is True"),
        ({"question": "1+1?", "answer": math.nan}, r"minerva\.jsonl:2: field 'answer' is nan, no answer"),
        (
            {"question": "1" * 400, "answer": "1"},
            r"minerva\.jsonl:2: the prompt has 472 tokens, above data\.max_prompt_tokens=400",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    good = {"question": "1+1?", "answer": "2"}
    (tmp_path / "minerva.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (good, row)))
    with pytest.raises(DataError, match=message):
        load_benchmarks(settings(benchmarks=["minerva"], benchmark_folder=str(tmp_path)), TOKENIZER, 400)


@pytest.mark.parametrize("greedy", [False, True])
def test_copies_of_a_problem_are_one_problem(tmp_path: Path, greedy: bool) -> None:
    """A file of 6 problems, each 32 times, had the standard error of 192 independent problems: 3.8 times too small."""
    name, key = ("minerva", "question") if greedy else ("aime24", "problem")
    rows = [{key: f"{i}+1?" + " " * (copy % 2), "answer": str(i + 1)} for copy in range(32) for i in range(6)]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = settings(benchmarks=[name], benchmark_folder=str(tmp_path), benchmark_samples=1)
    (problems,) = load_benchmarks(cfg, TOKENIZER, 400)
    assert [p.id for p in problems.prompts] == list(range(6)) and problems.entry.samples == (1 if greedy else 32)
    said = "186 repeats left out" if greedy else "186 repeats of problems taken as samples of these"
    assert said in problems.changes
    once = dataclasses.replace(cfg, max_problems=4)
    assert len(load_benchmarks(once, TOKENIZER, 400)[0].prompts) == 4
    with (tmp_path / f"{name}.jsonl").open("a") as file:  # one problem more, once
        file.write(json.dumps({key: "7+1?", "answer": "8"}) + "\n")
    (problems,) = load_benchmarks(cfg, TOKENIZER, 400)
    assert len(problems.prompts) == 7 and problems.entry.samples == 1 and "186 repeats left out" in problems.changes


def test_several_answers_are_joined(tmp_path: Path) -> None:
    rows = [{"question": "1?", "answer": ["$x=1$", 2.0]}, {"question": "2?", "answer": "$1$ or $2$"}]
    rows.append({"question": "3?", "answer": " "})  # which nothing equals: the grader says so of each sample
    (tmp_path / "minerva.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (problems,) = load_benchmarks(settings(benchmarks=["minerva"], benchmark_folder=str(tmp_path)), TOKENIZER, 400)
    assert [p.answer for p in problems.prompts] == ["x=1, 2", "$1$ or $2$", ""]


def test_an_empty_file_is_no_benchmark(tmp_path: Path) -> None:
    (tmp_path / "minerva.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"minerva\.jsonl: no problem of minerva is in it"):
        load_benchmarks(settings(benchmarks=["minerva"], benchmark_folder=str(tmp_path)), TOKENIZER, 400)


def test_without_a_file_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfg = settings(benchmarks=["olympiad_bench"], benchmark_folder=str(tmp_path))
    message = r"COMP:train: .*need the package datasets; .*olympiad_bench\.jsonl"
    with monkeypatch.context() as without, pytest.raises(DataError, match=message):
        without.setitem(sys.modules, "datasets", None)
        load_benchmarks(cfg, TOKENIZER, 400)
    asked = []

    def load_dataset(*words: Any, **named: Any) -> datasets.Dataset:
        asked.append((words, named))
        rows = (STAND_INS / "olympiad_bench.jsonl").read_text().splitlines()
        return datasets.Dataset.from_list([json.loads(line) for line in rows])

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (problems,) = load_benchmarks(cfg, TOKENIZER, 400)
    assert asked == [(("Hothan/OlympiadBench", "OE_TO_maths_en_COMP"), {"split": "train"})]
    assert [p.answer for p in problems.prompts] == ["2", "9", "12"]

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"cannot be loaded \(ConnectionError: no route to host\); or save its"):
        load_benchmarks(cfg, TOKENIZER, 400)


def test_samples_survive_the_file(tmp_path: Path) -> None:
    made = [sample(0, 0, True, text="é \u2028 \\boxed{1}\n"), sample(0, 1, False, answer=None, text="\ud800")]
    (tmp_path / "a.jsonl").write_bytes(to_lines(made))
    assert read_samples(tmp_path / "a.jsonl") == made


def test_a_result_by_hand() -> None:
    """Problem 0: right, right, wrong, cut off; problem 1: wrong (7), wrong (7), right, no answer."""
    samples = [
        *(sample(0, 0, True), sample(0, 1, True, answer="1.0"), sample(0, 2, False)),
        sample(0, 3, False, stop="length", answer=None),
        *(sample(1, 0, False, answer="7"), sample(1, 1, False, answer=" 7 "), sample(1, 2, True)),
        sample(1, 3, False, answer=None),
    ]
    found = result(samples)
    assert (found.problems, found.samples, found.accuracy.mean) == (2, 4, 0.375)
    assert found.accuracy.standard_error == pytest.approx(0.125)  # means 1/2 and 1/4
    assert found.pass_at == pytest.approx({1: 0.375, 2: (5 / 6 + 3 / 6) / 2, 4: 1.0})
    assert found.majority == 0.5  # the two right answers of problem 0 outvote; the two 7 of problem 1 as well
    assert (found.truncated, found.tokens, found.unreadable) == (1 / 8, 10, 0)
    assert result([dataclasses.replace(s, status="bad_gold") for s in samples]).unreadable == 2
    with pytest.raises(DataError, match="3 to 4 samples"):
        result(samples[:-1])


def test_partial_credit_is_a_mean_score_and_has_no_right_answers() -> None:
    whole = [sample(p, k, k == 0) for p in range(3) for k in range(2)]
    partial = [*whole[:-1], dataclasses.replace(whole[-1], score=0.1)]
    of_partial = result(partial)
    assert (of_partial.accuracy.mean, of_partial.pass_at, of_partial.majority) == (pytest.approx(3.1 / 6), {}, None)
    for samples, score, pass_at in ((whole, "avg@k, % ± SE", "100.00"), (partial, "mean score, % ± SE", NOTHING)):
        grid = figures("model", {"sums": result(samples)}, {})
        cells = dict(zip(grid.headings, grid.rows[0], strict=True))
        assert cells["pass@k"] == pass_at and cells[score].startswith(f"{100 * result(samples).accuracy.mean:.2f} ± ")
        assert any("neither 0 nor 1" in note for note in grid.notes) == (samples is partial)


def test_two_runs_are_compared_problem_by_problem() -> None:
    ours = [sample(p, k, p < 3 or k == 0) for p in range(6) for k in range(2)]  # 1, 1, 1, 1/2, 1/2, 1/2
    theirs = [sample(p, k, p in (1, 5)) for p in range(6) for k in range(2)]  # 0, 1, 0, 0, 0, 1
    found = compare(ours, theirs, "amc")
    assert (found.ours, found.theirs, found.difference.mean) == (0.75, pytest.approx(1 / 3), pytest.approx(5 / 12))
    assert (found.gained, found.lost) == ((0, 2), (5,))
    assert (found.difference.better, found.difference.worse) == (4, 1)
    other = [dataclasses.replace(s, gold="3") if s.problem == 4 else s for s in theirs]
    with pytest.raises(DataError, match=r"amc: .* not of the same problems: 1 differ, the first of them row 4"):
        compare(ours, other, "amc")
    with pytest.raises(DataError, match="row 5"):
        compare(ours, theirs[:-2], "amc")


def test_averages_over_benchmarks_and_over_samples() -> None:
    many = result([sample(p, k, True) for p in range(3) for k in range(4)])
    few = result([sample(p, 0, False) for p in range(4)])
    assert over_benchmarks({"amc": many, "minerva": few}) == 0.5
    assert over_samples({"amc": many, "minerva": few}) == 0.75


def test_the_published_rows_are_those_of_the_recipes() -> None:
    recipes = {"qwen2.5-7b": "Qwen2.5-7B", "qwen3-14b": "Qwen3-14B", "r1-llama-8b": "DeepSeek-R1-Distill-Llama-8B"}
    recipes |= {"mistral-7b": "Mistral-7B-Instruct-v0.2", "r1-qwen-7b": "DeepSeek-R1-Distill-Qwen-7B"}
    with Path("examples/paper/published.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["recipe"].startswith(("table1", "table2"))]
    ours = {(row.table, row.model, row.method): row for row in PUBLISHED if row.method != "base"}
    assert len(ours) == len(rows) == 20 and set(recipes.values()) == set(MODELS)
    for row in rows:
        table, _, rest = row.pop("recipe").partition("/")
        model, _, method = rest.rpartition("-")
        found = ours[f"Table {table[-1]}", recipes[model], method]
        assert found.average == float(row.pop("average"))
        assert found.accuracy == {name: float(figure) for name, figure in row.items() if figure}
    bases = {row.model: row for row in PUBLISHED if row.method == "base"}
    assert set(bases) == set(MODELS) and bases["Qwen3-14B"].accuracy["math500"] == 82.8
