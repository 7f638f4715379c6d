"""Fewer ranks after devices were lost, and the keys of a restart on request. Whole runs: tests/e2e/test_restart.py."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tepo_megatron.config import ParallelConfig
from tepo_megatron.config.io import plain, validate
from tepo_megatron.errors import ConfigError
from tepo_megatron.launcher.lost_devices import Devices, smaller_mesh
from tepo_megatron.launcher.restart_request import changed, take
from tepo_megatron.utils.save_requests import RESTART, RESTARTED


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (["0", "1", "2", "3"], None),
        (["1", "2", "3"], (1, ("1", "2"))),
        (["3", "0"], (1, ("3", "0"))),
        (["2"], "few"),
        ([], "few"),
    ],
)
def test_whole_replicas_go_on(left: list[str], expected: tuple[int, tuple[str, ...]] | str | None) -> None:
    devices, parallel = Devices(("0", "1", "2", "3"), ("4",)), ParallelConfig(tp=2, dp=2, min_dp=1)
    if expected == "few":
        with pytest.raises(ConfigError, match=r"no longer work: 0, 1.*too few for parallel\.min_dp=1 of 2 ranks each"):
            smaller_mesh(parallel, devices, lambda _: left, lambda _: None)
        return
    found = smaller_mesh(parallel, devices, lambda _: left, lambda _: None)
    assert (found and (found.parallel.dp, found.devices.ranks)) == expected
    assert found is None or found.devices.servers == ("4",)


def test_a_mesh_that_the_run_cannot_use_is_passed_over() -> None:
    """Three replicas are left of four, and experts are divided over two: ep does not divide dp x cp = 3."""
    devices, parallel = Devices(tuple("0123"), ()), ParallelConfig(dp=4, ep=2, min_dp=1)
    found = smaller_mesh(parallel, devices, lambda names: list(names[1:]), lambda _: None)
    assert found is not None and found.parallel.dp == 2 and "parallel.dp=2 instead of 4" in found.line

    def refuse(parallel: ParallelConfig) -> None:
        raise ConfigError(f"dp={parallel.dp}")

    with pytest.raises(ConfigError, match="too few"):
        smaller_mesh(parallel, devices, lambda names: list(names[1:]), refuse)
    assert smaller_mesh(replace(parallel, min_dp=None), devices, lambda _: [], refuse) is None


def tree(tmp_path: Path, **keys: object) -> dict[str, object]:
    text = {"name": "a", "output": str(tmp_path), "model": {"path": "m"}, "data": {"train": "t"}, **keys}
    return plain(validate(text))


def test_only_the_layout_can_be_changed_next_to_a_living_service(tmp_path: Path) -> None:
    started = tree(tmp_path, platform="cuda", parallel={"dp": 2}, checkpoint={"every": 5})
    assert changed(started, ["--parallel.dp", "1", "--parallel.tp=2"]).parallel.world_size == 2
    for words, why in (
        (["--seed", "3"], "--seed: next to a living rollout service only"),
        (["--rollout.temperature", "0.5"], "--rollout.temperature: next to"),
        (["--parallel.dp", "4"], "4 ranks are more than the 2 of the start"),
        (["--parallel.pd", "1"], "parallel.pd"),
    ):
        with pytest.raises(ConfigError) as e:
            changed(started, words)
        assert why in str(e.value)


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]", '["--seed", "3"]', '["--parallel.dp"]', "\x00"])
def test_a_request_that_cannot_be_understood_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / RESTART).write_text(text)
    cfg, line = take(tmp_path, tree(tmp_path, checkpoint={"every": 5}))
    assert cfg is None and "restarted as they were, because the request was refused" in line
    assert (tmp_path / RESTARTED).read_text().startswith("refused: ") and not (tmp_path / RESTART).exists()


def test_fewer_ranks_need_checkpoints_and_servers_on_other_devices(tmp_path: Path) -> None:
    for keys, why in (
        ({}, "parallel.min_dp restarts ranks from a checkpoint"),
        ({"checkpoint": {"every": 5}, "rollout": {"colocate": True}}, "parallel.min_dp with rollout.colocate=true"),
    ):
        with pytest.raises(ConfigError) as e:
            tree(tmp_path, parallel={"dp": 2, "min_dp": 1}, **keys)
        assert why in str(e.value)
    with pytest.raises(ConfigError, match="min_dp=3 is more than dp=2"):
        tree(tmp_path, parallel={"dp": 2, "min_dp": 3}, checkpoint={"every": 5})
    assert json.dumps(tree(tmp_path, parallel={"dp": 2, "min_dp": 1}, checkpoint={"every": 5}))
