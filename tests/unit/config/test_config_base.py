"""Config files that build on others: what wins, what null means, and whom an error names."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config, to_yaml

BASE: dict[str, Any] = {
    "name": "base",
    "model": {"path": "model"},
    "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
    "optimizer": {"lr": 1e-5, "warmup_steps": 3},
    "rollout": {"server": {"extra_args": ["--a", "--b"]}},
}


def write(path: Path, tree: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


@pytest.fixture
def child(tmp_path: Path) -> typing.Callable[..., Path]:
    write(tmp_path / "base.yaml", BASE)
    return lambda **keys: write(tmp_path / "rows" / "child.yaml", {"base": "../base.yaml", **keys})


def test_sections_are_merged_and_the_rest_is_replaced(child) -> None:
    cfg = load_config(child(name="child", optimizer={"lr": 1e-6}, rollout={"server": {"extra_args": ["--c"]}}))
    assert (cfg.name, cfg.optimizer.lr, cfg.optimizer.warmup_steps, cfg.data.eval) == ("child", 1e-6, 3, "eval.jsonl")
    assert cfg.rollout.server.extra_args == ["--c"]


def test_a_chain_reads_from_the_bottom_up(tmp_path: Path, child) -> None:
    child(optimizer={"lr": 1e-6, "warmup_steps": 8})
    top = write(tmp_path / "top.yaml", {"base": "rows/child.yaml", "optimizer": {"warmup_steps": 7}})
    assert dataclasses.astuple(load_config(top).optimizer)[:2] == (1e-6, 7)


def test_paths_are_relative_to_the_file_that_names_them(child, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = child()
    monkeypatch.chdir(path.parent)
    assert load_config("child.yaml").name == "base"
    assert load_config(write(tmp_path / "abs.yaml", {"base": str(path)})).name == "base"


def test_the_command_line_wins(child) -> None:
    path = child(optimizer={"lr": 1e-6})
    assert load_config(path, ["--optimizer.lr", "1e-7"]).optimizer.lr == 1e-7
    with pytest.raises(ConfigError, match=r"command line: optimizer\.lr: .*greater than 0"):
        load_config(path, ["--optimizer.lr", "0"])


def test_null_takes_back_a_key_and_a_section(child) -> None:
    assert load_config(child(optimizer={"warmup_steps": None})).optimizer.warmup_steps == 0
    assert load_config(child(optimizer={"warmup_steps": None})).optimizer.lr == 1e-5
    assert load_config(child(optimizer=None)).optimizer.lr == 5e-7
    assert load_config(child(), ["--data.eval", "null"]).data.eval is None
    with pytest.raises(ConfigError, match=r"child\.yaml: model\.path: this key is required"):
        load_config(child(model={"path": None}))
    with pytest.raises(ConfigError, match=r"child\.yaml: training\.steps: .*integer"):
        load_config(child(training={"steps": None}))  # nothing below to take back


def test_null_loses_no_meaning() -> None:
    """A key whose value may be null has null as its default, so resetting a key and setting it to null are the same."""

    def optional(cls: type, at: str) -> list[str]:
        found = []
        for field, hint in ((f, typing.get_type_hints(cls)[f.name]) for f in dataclasses.fields(cls)):
            if dataclasses.is_dataclass(hint):
                found += optional(hint, f"{at}{field.name}.")
            elif type(None) in typing.get_args(hint):
                assert field.default is None, f"{at}{field.name}"
                found.append(at + field.name)
        return found

    assert "data.eval" in optional(Config, "")


def test_the_resolved_config_needs_no_base(child, tmp_path: Path) -> None:
    cfg = load_config(child(name="child", optimizer={"lr": 1e-6}))
    assert "base:" not in to_yaml(cfg)
    resolved = tmp_path / "elsewhere" / "config.yaml"
    resolved.parent.mkdir()
    resolved.write_text(to_yaml(cfg))
    assert load_config(resolved) == cfg


@pytest.mark.parametrize(
    ("in_base", "in_child", "message"),
    [
        ({"optimizer": {"lr": 0}}, {}, r"^\S+/base\.yaml: optimizer\.lr: .*greater than 0"),
        ({"optimizer": {"lr": 0}}, {"optimizer": {"warmup_steps": 5}}, r"^\S+/base\.yaml: optimizer\.lr"),
        ({}, {"optimizer": {"lr": 0}}, r"^\S+/child\.yaml: optimizer\.lr"),
        ({"optimizer": {"lrr": 1}}, {}, r"^\S+/base\.yaml: optimizer\.lrr: unknown key; did you mean lr\?"),
        ({"rolout": {"engine": "vllm"}}, {}, r"^\S+/base\.yaml: rolout: unknown key"),
        ({"rollout": {"server": {"extra_args": [[1]]}}}, {}, r"^\S+/base\.yaml: rollout\.server\.extra_args\.0"),
        # a check across keys names the files that set its keys
        ({"parallel": {"sequence_parallel": True, "cp": 2}}, {"parallel": {"dp": 2}}, r"^\S+/base\.yaml: parallel: sequence_p"),
        ({"training": {"minibatch_prompts": 9}}, {"rollout": {"prompts_per_step": 8}}, r"^\S+/base\.yaml, \S+/child\.yaml: "),
        ({}, {"rollout": {"prompts_per_step": 8}}, r"^\S+/child\.yaml: config: training\.minibatch_prompts=16 exceeds"),
        # what nobody set: the file that was asked for
        ({"model": {"precision": "bf16"}}, {}, r"^\S+/child\.yaml: model\.path: this key is required"),
        ({"seed": 1}, {"seed": {"a": 1}}, r"^\S+/child\.yaml: seed is a value, not a section"),
    ],
)
def test_errors_name_the_file_that_set_the_key(tmp_path: Path, in_base: dict, in_child: dict, message: str) -> None:
    write(tmp_path / "base.yaml", BASE | in_base)
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path / "child.yaml", {"base": "base.yaml", **in_child}))


def test_circles_are_refused(tmp_path: Path) -> None:
    for name, base in (("a", "sub/b"), ("sub/b", "../c"), ("c", "a")):
        write(tmp_path / f"{name}.yaml", {"base": f"{base}.yaml"})
    with pytest.raises(ConfigError, match=r"a\.yaml: .*circle: \S+/a\.yaml -> \S+/b\.yaml -> \S+/c\.yaml -> \S+/a\.yaml;"):
        load_config(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"circle: \S+/self\.yaml -> \S+/self\.yaml;"):
        load_config(write(tmp_path / "self.yaml", {"base": "self.yaml"}))


def test_a_base_that_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "child.yaml", {"base": "gone.yaml"})
    with pytest.raises(ConfigError, match=r"/gone\.yaml: cannot read .*\(the base of \S+/child\.yaml\)"):
        load_config(path)
    for base in (["a.yaml", "b.yaml"], None):
        with pytest.raises(ConfigError, match=r"child\.yaml: base: one path of a YAML file, not "):
            load_config(write(path, {"base": base}))
