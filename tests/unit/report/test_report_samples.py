"""The samples of a report: which are shown, and what of them can be read."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tepo_megatron.report.run import RunRecord, read_run
from tepo_megatron.report.samples import TextSpan, of_text, of_tokens, read_samples
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
