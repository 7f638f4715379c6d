"""The defaults of keys that differ between platforms are in one table."""

from typing import Any

from tepo_megatron.config import Config
from tepo_megatron.config.io import plain, validate
from tepo_megatron.config.platform_defaults import PLATFORM_DEFAULTS
from tests.gate import plan

TREE: dict[str, Any] = {"name": "run", "model": {"path": "model"}, "data": {"train": "train.jsonl"}}


def value_of(tree: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def test_the_gate_sets_every_platform_default_to_that_of_cuda() -> None:
    cfg: Config = validate(TREE | {"platform": "cuda"})
    forced = plain(plan.on_a_cpu(cfg, "model", plan.worlds(cfg)[0], "fp32"))
    assert {key: value_of(forced, key) for key in PLATFORM_DEFAULTS} == {k: d.cuda for k, d in PLATFORM_DEFAULTS.items()}
