"""Servers of models with linear attention: their options, and the engine that is refused before anything is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5Config

from tepo_megatron.config import Config, ServerConfig
from tepo_megatron.config.io import validate
from tepo_megatron.errors import ConfigError
from tepo_megatron.inference.engine_api import LaunchSpec
from tepo_megatron.inference.engines import launch_of
from tepo_megatron.inference.linear_attention import check_linear_attention, layers_of
from tepo_megatron.inference.vllm import VllmApi
from tepo_megatron.launcher.preflight import preflight
from tests.tiny import hybrid_config, tiny_model, tiny_qwen3


def config(model: Path, engine: str, platform: str) -> Config:
    return validate({
        "name": "run", "platform": platform, "model": {"path": str(model)}, "data": {"train": "t"},
        "rollout": {"engine": engine},
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


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rollout": {"server": {"tp": 2}}}, r"engine=torch with server\.tp=2: .*set server\.tp to 1"),
        ({"rollout": {"replay_experts": True}}, r"engine=torch with replay_experts=true: .*set replay_experts to false"),
        ({"sync": {"quantize": "fp8"}}, r"sync\.quantize=fp8 with rollout\.engine=torch: .*set sync\.quantize=none"),
    ],
)
def test_what_the_torch_engine_cannot_do_is_refused(section: dict[str, Any], message: str) -> None:
    run = {"name": "run", "platform": "cuda", "model": {"path": "m"}, "data": {"train": "t"}}
    with pytest.raises(ConfigError, match=message):
        validate(run | section | {"rollout": section.get("rollout", {}) | {"engine": "torch"}})


def test_all_else_is_served(models: dict[str, Path]) -> None:
    for model, engine, platform in (
        ("hybrid", "vllm", "cpu"), ("hybrid", "sglang", "cuda"), ("whole", "vllm", "cuda"), ("dense", "sglang", "cpu"),
    ):  # fmt: skip
        assert launch(config(models[model], engine, platform)).linear_attention is (model != "dense")
    replayed = config(models["hybrid"], "sglang", "cpu").rollout
    check_linear_attention(replace(replayed, replay="run"), str(models["hybrid"]), "cpu")


def test_the_options_of_a_server(models: dict[str, Path]) -> None:
    def words(model: str, platform: str) -> list[str]:
        return VllmApi().command(ServerConfig(), launch(config(models[model], "vllm", platform)), port=1)

    off: Any = {"--no-enable-prefix-caching", "--no-enable-chunked-prefill"}
    assert off <= set(words("hybrid", "cpu")) and "--no-enable-prefix-caching" not in words("dense", "cpu")
    assert not off & set(words("hybrid", "cuda")), "nothing is switched off on a GPU"
    assert "--language-model-only" in words("whole", "cuda") and "--language-model-only" not in words("hybrid", "cuda")


def test_a_model_that_is_not_there_has_no_known_layers(models: dict[str, Path], tmp_path: Path) -> None:
    assert layers_of(models["missing"]) == {}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Unknown"]}))
    assert layers_of(tmp_path) == {}
    assert layers_of(models["dense"]) == {"linear_attention": False, "text_only": False}
    assert layers_of(models["whole"]) == {"linear_attention": True, "text_only": True}
