"""What the data of a run is: keys, columns and slices of its config, several sets, and prompts that they share."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.config import DataConfig, DataSet, RewardConfig
from tepo_megatron.config.io import load_config, to_yaml, validate
from tepo_megatron.data import Data, PromptStream, load_data
from tepo_megatron.data.sources import DatasetSource
from tests.datasets import write


def config(data: dict[str, Any], **more: Any) -> Any:
    return validate({"name": "a", "model": {"path": "m"}, "data": data, **more})


def test_one_set_and_several() -> None:
    one = config({"train": "t.jsonl[:9]", "answer_key": "gold"}).data
    assert one.sets == [DataSet(path="t.jsonl[:9]", answer_key="gold")] and one.name == "t.jsonl[:9]"
    several = config({"train": [{"path": "a"}, {"path": "b", "weight": 2, "prompt_key": "q"}], "prompt_key": "p", "eval": "e"})
    assert several.data.sets == [DataSet(path="a", prompt_key="p"), DataSet(path="b", weight=2.0, prompt_key="q")]
    assert several.data.paths == [("data.train", "a"), ("data.train", "b"), ("data.eval", "e")]


def test_resolved_configs_load_again(tmp_path: Path) -> None:
    cfg = config({"train": [{"path": "a[:3]", "weight": 2}], "template_kwargs": {"enable_thinking": False}})
    (tmp_path / "c.yaml").write_text(to_yaml(cfg))
    assert load_config(tmp_path / "c.yaml") == cfg
    words = ["--data.train", "[{path: x}, {path: y}]", "--data.template_kwargs.level", "2"]
    changed = load_config(tmp_path / "c.yaml", words).data
    assert [s.path for s in changed.sets] == ["x", "y"]  # a list is replaced as a whole
    assert changed.template_kwargs == {"enable_thinking": False, "level": 2}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": "t.jsonl[:5"}, r"^config: data: train='t\.jsonl\[:5' does not end with a slice like \[:1000\]"),
        ({"train": "t", "eval": "t[a:5]"}, r"eval='t\[a:5\]' does not end with a slice"),
        ({"train": "t[:101%]"}, "no more than 100%"),
        ({"train": "[:5]"}, "names no file"),
        ({"train": []}, r"train=\[\] names no set"),
        ({"train": None}, r"^config: data\.train: Input should be a valid string \(got None\)$"),
        ({"train": [{"path": "a", "weigth": 2}]}, r"^config: data\.train\.0\.weigth: unknown key; did you mean weight\?$"),
        ({"train": [{"weight": 2}]}, r"^config: data\.train\.0\.path: this key is required$"),
        ({"train": [{"path": "a", "weight": 0}]}, r"^config: data\.train\.0\.weight: .*greater than 0 \(got 0\)$"),
        ({"train": [{"path": "a[5:"}]}, r"^config: data\.train\.0: path='a\[5:' does not end"),
        ({"train": "a", "template_kwargs": {"tokenize": True}}, r"template_kwargs\.tokenize is set by the package"),
        ({"train": "a", "check_answers": "maybe"}, r"data\.check_answers: Input should be 'tell', 'drop'"),
    ],
)
def test_a_wrong_data_section_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(data)


def test_brackets_of_several_files_are_no_slice() -> None:
    assert DatasetSource.of("data/train-[0-9].jsonl").path == "data/train-[0-9].jsonl"
    assert DataConfig(train="data/train-[0-9].jsonl[:5]").name == "data/train-[0-9].jsonl[:5]"


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
