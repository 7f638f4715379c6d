"""Data sections of the config: the accepted ones, and the refusal of each wrong one."""

from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import DataConfig, DataSet
from tepo_megatron.config.io import load_config, to_yaml, validate
from tepo_megatron.data.sources import DatasetSource
from tepo_megatron.errors import ConfigError
from tepo_megatron.observability.run_dir import prepare


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


def test_a_set_in_the_run_that_would_be_replaced(tmp_path: Path) -> None:
    inside = tmp_path / "a" / "rollouts" / "t.jsonl"
    inside.parent.mkdir(parents=True)
    inside.write_text("{}")
    (tmp_path / "a" / "metrics.jsonl").write_text("{}\n")
    cfg = config({"train": [{"path": "b"}, {"path": f"{inside}[:5]"}]}, output=str(tmp_path), overwrite=True)
    with pytest.raises(ConfigError, match=r"^data\.train=.*t\.jsonl\[:5\] lies in the run that would be replaced"):
        prepare(cfg)
    assert inside.exists()
