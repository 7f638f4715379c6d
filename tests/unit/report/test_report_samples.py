"""The samples of a report: which are shown, and what of them can be read."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tepo_megatron.config import Config
from tepo_megatron.report import RunRecord, read_run
from tepo_megatron.report.benchmarks import BenchmarkPanel, over_steps, read_benchmarks
from tepo_megatron.report.held_out import change, read_held_out
from tepo_megatron.report.samples import MOST_CHANGED, read_samples
from tepo_megatron.report.words import TextSpan, of_text, of_tokens, shortened
from tepo_megatron.rollout import record
from tests.report_runs import measured, record_step, rollout, write_run
from tests.tiny import EOS, VOCAB_SIZE, char_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return char_tokenizer()


@pytest.fixture
def run(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> RunRecord:
    """A run whose model is next to it."""
    tokenizer.save_pretrained(tmp_path / "model")
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, measured(1), model={"path": str(tmp_path / "model")})
    return read_run(folder)


def text(pieces: list[TextSpan]) -> str:
    return "".join(piece.text for piece in pieces)


def test_the_best_worst_and_longest_of_the_first_and_last_step(run: RunRecord, tokenizer: PreTrainedTokenizerFast) -> None:
    def make(prompt: int, words: str, score: float, reward: float) -> object:
        return rollout(prompt, tokenizer("1+6?").input_ids, tokenizer(words + EOS).input_ids, score, reward=reward)

    record_step(run.folder, 2, [make(0, "\\{7}", 1, 1), make(1, "8", 0, -0.5), make(2, "it is 7", 1, 1), make(3, "9", 0, 0)])
    record_step(run.folder, 4, [make(0, "7", 1, 1), make(1, "no idea", 0, 0)])
    found = read_samples(run)
    first, last = found.groups[:2]
    assert [(s.title, text(s.response)) for s in first.samples] == [
        ("best", "\\{7}<eos>"), ("worst", "8<eos>"), ("longest", "it is 7<eos>"),
    ]  # fmt: skip
    assert [(s.title, text(s.response)) for s in last.samples] == [("best", "7<eos>"), ("worst, longest", "no idea<eos>")]
    assert (first.title, last.title) == ("step 2", "step 4")
    worst = first.samples[1]
    assert list(worst.facts[:4]) == ["reward -0.5", "score 0", "wrong", "2 tokens"] and not worst.right
    assert first.samples[0].right and text(worst.prompt) == "1+6?" and worst.answer == "7"


def test_what_changed_most_between_its_first_and_last_step(run: RunRecord) -> None:
    def group(prompt: int, *scores: float) -> list[object]:
        return [rollout(prompt, [5], [6 + i, 7], score) for i, score in enumerate(scores)]

    record_step(run.folder, 1, [*group(8, 0, 0, 1), *group(9, 0, 0, 0), *group(3, 1, 1)])
    record_step(run.folder, 2, [*group(9, 1, 1, 1), *group(4, 1, 0)])
    record_step(run.folder, 3, [*group(8, 1, 1, 1), *group(9, 1, 0, 1), *group(7, 0)])
    found = read_samples(run)
    changed = [g for g in found.groups if g.title.startswith("most changed")]
    assert [g.title for g in changed] == ["most changed: prompt 8, 0.333 → 1", "most changed: prompt 9, 0 → 0.667"]
    assert len(changed) <= MOST_CHANGED
    assert [s.title for s in changed[1].samples] == ["step 1, mean score 0 of 3", "step 3, mean score 0.667 of 3"]
    assert [s.right for s in changed[1].samples] == [False, True], "the sample next to the mean"


def test_what_cannot_be_read_is_a_note(run: RunRecord, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    record_step(run.folder, 1, [rollout(0, [5], [6, 7], 1.0)])
    (tmp_path / "model" / "tokenizer.json").unlink()
    found = read_samples(run)
    assert text(found.groups[0].samples[0].response) == "6 7 "
    assert any("Token ids are shown" in note and "tokenizer.json" in note for note in found.notes)
    assert any("No prompt was recorded at two steps" in note for note in found.notes)
    tokenizer.save_pretrained(run.folder / "hf")
    assert text(read_samples(run).groups[0].samples[0].response) == "23", "the exported model has the same"
    record_step(run.folder, 2, [rollout(0, [5], [6, 7], 1.0)])
    record.file_of(run.folder / "rollouts", 2).write_bytes(b"cut off")
    found = read_samples(run)
    assert any("step-000002.safetensors: not the recorded rollouts" in note for note in found.notes)


def test_a_run_that_replays_shows_what_it_replays(run: RunRecord, tmp_path: Path) -> None:
    record_step(run.folder, 1, [rollout(0, [5], [6], 1.0)])
    again = tmp_path / "again"
    again.mkdir()
    cfg: Config = write_run(again, measured(1), rollout={"replay": str(run.folder / "rollouts")})
    found = read_samples(RunRecord(again, cfg, run.curves, None))
    assert found.groups[0].title == "step 1"


def test_special_tokens_and_tool_output_are_marked(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [*tokenizer("ab").input_ids, *tokenizer(f"cd{EOS}").input_ids, *tokenizer("ef").input_ids, VOCAB_SIZE + 3]
    mask = [False, False, True, True, True, False, False, True]
    prompt, response = of_tokens(ids, mask, tokenizer)
    assert prompt == [TextSpan("prompt", "ab")]
    assert response == [
        TextSpan("response", "cd"), TextSpan("special", EOS), TextSpan("context", "ef"),
        TextSpan("special", f"token {VOCAB_SIZE + 3}"),
    ]  # fmt: skip


def test_invisible_characters_are_named() -> None:
    found = of_text("a\u202eb\x00\n\t\ud800é漢", "response")
    assert found == [
        TextSpan("response", "a"), TextSpan("control", "U+202E"), TextSpan("response", "b"), TextSpan("control", "U+0000"),
        TextSpan("response", "\n\t"), TextSpan("control", "U+D800"), TextSpan("response", "é漢"),
    ]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=9), max_size=9), st.integers(1, 12))
def test_of_what_is_long_both_ends_are_kept(texts: list[str], kept: int) -> None:
    whole = [TextSpan("response", t) for t in texts]
    found, all_of_it = shortened(whole, kept), "".join(texts)
    if len(all_of_it) <= 2 * kept:
        assert found == whole
        return
    (cut,) = [i for i, piece in enumerate(found) if piece.kind == "cut"]
    assert text(found[:cut]) == all_of_it[:kept] and text(found[cut + 1 :]) == all_of_it[-kept:]
    assert found[cut].text == f"{len(all_of_it) - 2 * kept:,} characters left out"


def test_the_problems_that_changed_most(run: RunRecord, tmp_path: Path) -> None:
    scores = [(0, 0.5, 0.5), (1, 0.0, 1.0), (2, 1.0, 0.5)]
    lines = [f'{{"problem": {p}, "before": {before}, "after": {after}}}\n' for p, before, after in scores]
    (run.folder / "evaluation.jsonl").write_text("".join(lines))
    assert [(p.number, p.text) for p in read_held_out(run).changed] == [(1, ""), (2, "")], "the data are not there"
    rows = ['{"prompt": "a", "answer": 1}', '{"prompt": [{"role": "user", "content": "b"}], "answer": 2}', "cut"]
    (tmp_path / "eval.jsonl").write_text("\n".join(rows))
    cfg = write_run(run.folder, measured(1), data={"train": "t.jsonl", "eval": str(tmp_path / "eval.jsonl")})
    found = read_held_out(RunRecord(run.folder, cfg, run.curves, None))
    assert [(p.text, p.answer) for p in found.changed] == [("user: b", "2"), ("", "")]
    assert found.change is not None and (found.change.better, found.change.worse, found.change.same) == (1, 1, 1)


def test_a_paired_difference_by_hand() -> None:
    """Changes 100, 0, 0 and 100 points: mean 50, deviation 57.7, so 3.182 (Student, 3) * 57.7 / 2 to each side, at most 100."""
    found = change({0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}, {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0})
    assert found is not None and found.mean == 0.5 and found.interval == pytest.approx((-0.4187, 1), abs=1e-4)
    assert (found.better, found.worse, found.same, found.verdict) == (2, 0, 2, "within noise")
    assert change({0: 1.0}, {1: 1.0}) is None and change({}, {}) is None
    single = change({0: 1.0}, {0: 0.0})
    assert single is not None and single.interval is None and str(single) == "+100.0 points"


def write_benchmark(run: RunRecord, step: int, scores: dict[int, list[float]]) -> None:
    """As `evaluation.benchmarks` does during a run."""
    folder = run.folder / "evaluation" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    rows = [
        {"problem": p, "sample": i, "score": s, "status": "exact", "answer": "7", "gold": "7", "tokens": 3, "stop": "length",
         "text": f"{step} {p} {i} \ud800"}
        for p, of_problem in scores.items() for i, s in enumerate(of_problem)
    ]  # fmt: skip
    (folder / "amc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    accuracy = {"mean": 0.25 * step, "standard_error": 0.125, "interval": [0, 1], "bootstrap": None}
    (folder / "evaluation.json").write_text(json.dumps({"benchmarks": {"amc": {"result": {"accuracy": accuracy}}}}))


def test_benchmarks_of_a_run(run: RunRecord) -> None:
    assert read_benchmarks(run) == BenchmarkPanel({}, [], [])
    write_benchmark(run, 0, {0: [0.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 0.0]})
    write_benchmark(run, 2, {0: [0.0, 0.0], 1: [1.0, 0.0], 2: [1.0, 1.0]})
    found = read_benchmarks(run)
    assert found.scores == {0: {"amc": (0.0, 0.125)}, 2: {"amc": (0.5, 0.125)}}
    assert (found.steps, found.rows()) == (["step 0", "step 2"], [("amc", "0.0 ± 12.5", "50.0 ± 12.5")])
    assert [g.title for g in found.groups] == ["amc, problem 1: 1 → 0.5", "amc, problem 2: 0 → 1"]
    before, after = found.groups[1].samples
    assert text(before.response) == "0 2 0 U+D800" and not before.right and after.right and after.title.startswith("step 2, ")
    (axis,) = over_steps(found.scores).axes
    drawn = [(s.label, s.x.tolist(), [row.tolist() for row in s.rows]) for s in axis.series]
    assert drawn == [("", [0, 2], [[0.0, 0.5], [-0.125, 0.375], [0.125, 0.625]]), ("amc", [0, 2], [[0.0, 0.5]])]
    (run.folder / "evaluation" / "step-00000002" / "amc.jsonl").write_text("{}\n")
    (run.folder / "evaluation" / "step-00000000" / "evaluation.json").write_text("{}")
    write_benchmark(run, 1, {0: [1.0]})
    found = read_benchmarks(run)
    assert list(found.scores) == [1, 2] and len(found.notes) == 2
    assert "evaluation.json: not the results" in found.notes[0] and "amc.jsonl: there is no sample in it" in found.notes[1]
