"""The engines that `rollout.engine` can name. A new one is a file with an `EngineApi` and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from tepo_megatron.config import RolloutConfig
from tepo_megatron.rollout.endpoint import Endpoint
from tepo_megatron.rollout.engine import EngineApi, Launch
from tepo_megatron.rollout.fleet import Fleet
from tepo_megatron.rollout.sglang import SglangApi
from tepo_megatron.rollout.vllm import VllmApi

ENGINES: Mapping[str, Callable[[], EngineApi]] = {"vllm": VllmApi, "sglang": SglangApi}


def build_engine(cfg: RolloutConfig, launch: Launch, log_path: Path) -> Fleet:
    """The servers of the config, not yet started. log_path: of a single server; several have their number in the name."""
    endpoints = []
    for i in range(cfg.servers):
        one = cfg.servers == 1
        name = "the inference server" if one else f"inference server {i}"
        log = log_path if one else log_path.with_stem(f"{log_path.stem}-{i}")
        here = replace(launch, first_device=launch.first_device + i * cfg.server.tp)
        endpoints.append(Endpoint(name, ENGINES[cfg.engine](), cfg.server, here, log))
    return Fleet(endpoints, cfg)
