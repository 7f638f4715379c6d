"""All that a run reads: several sets, prompts that they share, and what it is evaluated on."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tepo_megatron.config import DataConfig, RewardConfig
from tepo_megatron.data import Data, PromptStream, load_data
from tepo_megatron.errors import DataError
from tests.datasets import write


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    one = write(tmp_path / "one.jsonl", *({"prompt": f"{i}+1?", "answer": i + 1} for i in range(10)))
    two = write(tmp_path / "two.jsonl", *({"question": f"{i}+1?", "label": f"{i + 1}", "other": 0} for i in range(8, 28)))
    return one, two


def load(tokenizer: PreTrainedTokenizerFast, **data: Any) -> Data:
    return load_data(DataConfig(**data), RewardConfig(timeout_seconds=60.0), tokenizer)


def test_sets_with_their_weights_and_keys(files: tuple[Path, Path], tokenizer: PreTrainedTokenizerFast) -> None:
    one, two = files
    data = load(tokenizer, train=[{"path": f"{one}[:9]", "weight": 3}, {"path": str(two), "answer_key": "label"}])
    (first, heavy), (second, light) = data.train
    assert (len(first), len(second), heavy, light, data.count) == (9, 19, 3, 1, 28)  # "8+1?" is the first set's
    assert len({p.id for p in first + second}) == 28 and [p.id for p in first] == list(range(9))
    assert data.log_lines == [
        f"{one}[:9]: own (prompt, answer), 10 rows, 9 prompts; dropped: 1 outside the slice",
        f"{one}[:9]: {one}:1 '0+1?' has the answer '1'",
        f"{two}: keys (question, label), 20 rows, 19 prompts; dropped: 1 in an earlier set",
        f"{two}: {two}:2 '9+1?' has the answer '10'",
    ]
    taken = PromptStream.mixed(data.train, seed=0, shuffle=True).take(12)
    assert sum(p.id < 9 for p in taken) == 9


def test_sets_that_contradict_each_other_are_refused(
    files: tuple[Path, Path], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    one, _ = files
    other = write(tmp_path / "other.jsonl", {"prompt": "3+1?", "answer": 5}, {"prompt": "x", "answer": 1})
    sets = [{"path": str(one)}, {"path": str(other)}]
    with pytest.raises(DataError, match=rf"^{other}:1: the answer is '5', and for the same prompt at {one}:4 '4'"):
        load(tokenizer, train=sets)
    assert [len(prompts) for prompts, _ in load(tokenizer, train=sets, skip_bad_rows=True).train] == [10, 1]


def test_prompts_of_both_train_and_eval_are_reported(files: tuple[Path, Path], tokenizer: PreTrainedTokenizerFast) -> None:
    one, _ = files
    data = load(tokenizer, train=f"{one}[:60%]", eval=f"{one}[60%:]")
    assert ([p.id for p in data.eval], len(data.log_lines)) == ([6, 7, 8, 9], 4)
    data = load(tokenizer, train=f"{one}[:60%]", eval=f"{one}[50%:]")
    assert data.log_lines[-1] == "warning: 1 of the 5 prompts of data.eval are in data.train too"
