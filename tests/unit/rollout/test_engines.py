"""The servers that a rank starts: their GPUs, and models with linear attention, which some engines cannot serve."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.command.start import preflight
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.engines import check_linear_attention, first_server_device, launch_of
from tepo_megatron.engines.servers.environment import devices
from tests.tiny import hybrid_config, tiny_model, tiny_qwen3


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


def config_of(model: Path, engine: str, platform: str) -> Config:
    return validate({
        "name": "run", "platform": platform, "model": {"path": str(model)},
        "data": {"train": "t", "max_prompt_tokens": 32}, "rollout": {"engine": engine, "max_response_tokens": 32},
    })  # fmt: skip


def launch(cfg: Config) -> LaunchSpec:
    return launch_of(cfg.model, cfg.rollout, cfg.sync, platform=cfg.platform, max_model_len=64, seed=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model, a hybrid, and a hybrid in files that hold a vision tower, of which the last has a config_of alone."""
    folder = tmp_path_factory.mktemp("models")
    tiny_qwen3(folder / "dense", layers=1)
    tiny_model(folder / "hybrid", hybrid_config())
    whole = Qwen3_5Config(text_config=hybrid_config().to_dict(), architectures=["Qwen3_5ForConditionalGeneration"])
    whole.save_pretrained(folder / "whole")
    return {name: folder / name for name in ("dense", "hybrid", "whole", "missing")}


def test_sglang_on_a_cpu_is_refused_by_name_and_reason(models: dict[str, Path]) -> None:
    cfg = config_of(models["hybrid"], "sglang", "cpu")
    with pytest.raises(ConfigError, match=r"rollout\.engine=sglang with platform=cpu: .*linear attention .*sgl_kernel; use"):
        check_linear_attention(cfg.rollout, cfg.model.path, cfg.platform)
    for asked in (preflight, launch):
        with pytest.raises(ConfigError, match="sgl_kernel"):
            asked(cfg)
    with pytest.raises(ConfigError, match="sgl_kernel"):
        launch(config_of(models["whole"], "sglang", "cpu"))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_torch_engine_is_refused_on_every_platform(models: dict[str, Path], platform: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine=torch: .*linear attention .*use rollout\.engine=vllm"):
        launch(config_of(models["hybrid"], "torch", platform))
