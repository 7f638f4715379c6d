"""The defaults of keys that differ between platforms are in one table."""

from __future__ import annotations

from typing import Any

import pytest

from tepo_megatron.config import Config
from tepo_megatron.config.io import plain, validate
from tepo_megatron.config.megatron import CHECKED
from tepo_megatron.config.platform_defaults import PLATFORM_DEFAULTS, default_of
from tests.gate import plan

TREE: dict[str, Any] = {"name": "run", "model": {"path": "model"}, "data": {"train": "train.jsonl"}}


def value_of(tree: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize("key", PLATFORM_DEFAULTS)
def test_a_key_with_a_platforms_default_is_unset_in_the_config(key: str) -> None:
    default = PLATFORM_DEFAULTS[key]
    section, _, name = key.removeprefix("megatron.").partition(".")
    if key.startswith("megatron."):
        assert getattr(CHECKED[section](), name) is None and plain(validate(TREE))["megatron"][section] == {}
    else:
        assert value_of(plain(validate(TREE)), key) in (None, "auto")
    assert default.cpu != default.cuda and default.why
    assert default_of(key, "cpu", None) == default.cpu and default_of(key, "cuda", None) == default.cuda
    assert default_of(key, "cuda", default.cpu) == default.cpu


def test_the_gate_sets_every_platform_default_to_that_of_cuda() -> None:
    cfg: Config = validate(TREE | {"platform": "cuda"})
    forced = plain(plan.on_a_cpu(cfg, "model", plan.worlds(cfg)[0], "fp32"))
    assert {key: value_of(forced, key) for key in PLATFORM_DEFAULTS} == {k: d.cuda for k, d in PLATFORM_DEFAULTS.items()}


def test_no_default_of_the_config_changes_with_the_platform_elsewhere() -> None:
    """Methods of the config that take a platform differ for keys in the table only: with these set, they agree."""
    tree = TREE | {"sync": {}, "rollout": {"server": {}}, "training": {}, "megatron": {"ddp": {}, "transformer": {}}}
    for key, default in PLATFORM_DEFAULTS.items():
        section, _, name = key.rpartition(".")
        value_of(tree, section)[name] = default.cuda
    cfg = validate(tree)
    assert cfg.megatron.reduces_early("cpu") == cfg.megatron.reduces_early("cuda")
    assert cfg.megatron.gathers_late("cpu") == cfg.megatron.gathers_late("cuda")
    assert cfg.training.shares_prompts("cpu") == cfg.training.shares_prompts("cuda")
    assert cfg.megatron.fuses_gradient_accumulation("cpu", False) == cfg.megatron.fuses_gradient_accumulation("cuda", False)
