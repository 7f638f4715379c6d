"""Servers of models with linear attention: their options, and the engine that is refused before anything is started."""

from pathlib import Path

import pytest
from transformers import Qwen3_5Config

from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.errors import ConfigError
from tepo_megatron.inference.engine_api import LaunchSpec
from tepo_megatron.inference.engines import launch_of
from tepo_megatron.inference.model_checks import check_linear_attention
from tepo_megatron.launcher.preflight import preflight
from tests.tiny import hybrid_config, tiny_model, tiny_qwen3


def config(model: Path, engine: str, platform: str) -> Config:
    return validate({
        "name": "run", "platform": platform, "model": {"path": str(model)},
        "data": {"train": "t", "max_prompt_tokens": 32}, "rollout": {"engine": engine, "max_response_tokens": 32},
    })  # fmt: skip


def launch(cfg: Config) -> LaunchSpec:
    return launch_of(cfg.model, cfg.rollout, cfg.sync, platform=cfg.platform, max_model_len=64, seed=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model, a hybrid, and a hybrid in files that hold a vision tower, of which the last has a config alone."""
    folder = tmp_path_factory.mktemp("models")
    tiny_qwen3(folder / "dense", layers=1)
    tiny_model(folder / "hybrid", hybrid_config())
    whole = Qwen3_5Config(text_config=hybrid_config().to_dict(), architectures=["Qwen3_5ForConditionalGeneration"])
    whole.save_pretrained(folder / "whole")
    return {name: folder / name for name in ("dense", "hybrid", "whole", "missing")}


def test_sglang_on_a_cpu_is_refused_by_name_and_reason(models: dict[str, Path]) -> None:
    cfg = config(models["hybrid"], "sglang", "cpu")
    with pytest.raises(ConfigError, match=r"rollout\.engine=sglang with platform=cpu: .*linear attention .*sgl_kernel; use"):
        check_linear_attention(cfg.rollout, cfg.model.path, cfg.platform)
    for asked in (preflight, launch):
        with pytest.raises(ConfigError, match="sgl_kernel"):
            asked(cfg)
    with pytest.raises(ConfigError, match="sgl_kernel"):
        launch(config(models["whole"], "sglang", "cpu"))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_torch_engine_is_refused_on_every_platform(models: dict[str, Path], platform: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine=torch: .*linear attention .*use rollout\.engine=vllm"):
        launch(config(models["hybrid"], "torch", platform))
