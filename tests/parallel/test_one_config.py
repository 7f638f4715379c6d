"""All ranks of a run have one config: where one has another, all end with one message that names it."""

import re
from pathlib import Path

import pytest

from tepo_megatron.base.errors import ConfigError, TepoError
from tepo_megatron.config.io import plain, validate
from tepo_megatron.dist import parallel
from tepo_megatron.dist.platform import activate
from tests.services import train_here
from tests.worlds import run_world

TREE = {"name": "a", "platform": "cpu", "model": {"path": "m"}, "data": {"train": "t"}, "parallel": {"tp": 1, "dp": 2}}


def joined(rank: int, rates: list[float]) -> str:
    cfg = validate({**TREE, "optimizer": {"lr": rates[rank]}})
    try:
        parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed, config=plain(cfg))
    except ConfigError as e:
        return str(e)
    return "joined"


def trained(rank: int, rates: list[float], folder: Path) -> str:
    cfg = validate({**TREE, "output": str(folder), "optimizer": {"lr": rates[rank]}})
    with pytest.raises(TepoError) as raised:  # the model is missing, too
        train_here(cfg)
    return str(raised.value)


def test_training_compares_the_configs_before_anything_else(tmp_path: Path) -> None:
    assert all("was started with another config" in message for message in run_world(2, trained, [1e-3, 2e-3], tmp_path))


def test_a_rank_with_another_config_is_named_on_all_ranks() -> None:
    assert run_world(2, joined, [1e-3, 1e-3]) == ["joined", "joined"]
    first, second = run_world(2, joined, [1e-3, 2e-3])
    assert first == second
    named = r"rank 1 on \S+ was started with another config than rank 0 \(optimizer\.lr .*0\.001.*0\.002"
    assert re.search(named, first), first
