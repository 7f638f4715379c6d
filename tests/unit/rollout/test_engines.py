"""The servers that a rank starts get the right GPUs."""

from typing import Any

import pytest
import torch

from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.errors import ConfigError
from tepo_megatron.inference.engines import first_server_device
from tepo_megatron.inference.servers.environment import devices


def config(**rollout: Any) -> Config:
    tree = {
        "name": "run",
        "model": {"path": "m"},
        "data": {"train": "d"},
        "parallel": {"tp": 2, "dp": 2},
        "sync": {"transport": {"folder": "w"}},
    }
    return validate({**tree, "rollout": rollout})


def first_of(cfg: Config) -> int:
    return first_server_device(cfg.rollout, cfg.platform, cfg.parallel.world_size)


@pytest.mark.parametrize(
    ("rollout", "first"), [({"servers": 2, "server": {"tp": 2}}, 4), ({"servers": 2, "server": {"tp": 2}, "colocate": True}, 0)]
)
def test_servers_follow_the_ranks_of_their_machine(
    monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any], first: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert first_of(config(**rollout)) == first
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # on two machines
    assert first_of(config(**rollout)) == first / 2


def test_missing_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(
        ConfigError, match=r"4 ranks, and rollout\.servers=1 .* take 5 GPUs, and this machine has 4; let them take"
    ):
        first_of(config())
    first_of(config(colocate=True))
    first_of(config(server={"urls": ["http://a:1"]}))


def test_devices_are_of_those_that_are_seen() -> None:
    assert devices({}, 4, 2) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert devices({"CUDA_VISIBLE_DEVICES": "2,3,6,7"}, 2, 2) == {"CUDA_VISIBLE_DEVICES": "6,7"}
