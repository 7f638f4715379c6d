"""Build the engine that `rollout.engine` names, with servers of this machine, at URLs, or from a rendezvous folder.

A new engine is a file with an `EngineApi` and a row in `ENGINES`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.types import MASK_TIES
from tepo_megatron.config import ModelConfig, RendezvousServerConfig, RolloutConfig, ServerConfig, SyncConfig, UrlServerConfig
from tepo_megatron.engines.engine_api import EngineApi, LaunchSpec, Platform
from tepo_megatron.engines.model_checks import check_linear_attention, layers_of
from tepo_megatron.engines.servers.endpoint import Endpoint
from tepo_megatron.engines.servers.fleet import Fleet
from tepo_megatron.engines.servers.listener import RunListener
from tepo_megatron.engines.servers.local import LocalServer
from tepo_megatron.engines.servers.process import LOOPBACK
from tepo_megatron.engines.servers.remote import FoundServer, NamedServer
from tepo_megatron.engines.servers.server import Server
from tepo_megatron.engines.sglang import SglangApi
from tepo_megatron.engines.torch_engine import TorchApi
from tepo_megatron.engines.vllm import VllmApi

ENGINES: Mapping[str, Callable[[], EngineApi]] = {"vllm": VllmApi, "sglang": SglangApi, "torch": TorchApi}


def launch_of(
    model: ModelConfig,
    rollout: RolloutConfig,
    sync: SyncConfig,
    *,
    platform: Platform,
    max_model_len: int,
    seed: int,
    first_device: int = 0,
    host: str = LOOPBACK,
    counts: bool = False,
) -> LaunchSpec:
    """Return the settings with which the servers of a run are started.

    Raises ConfigError if the engine cannot serve the model.
    """
    check_linear_attention(rollout, model.path, platform)
    return LaunchSpec(
        model_path=Path(model.path),
        max_model_len=max_model_len,
        platform=platform,
        precision=rollout.server.precision or model.dtype,
        seed=seed,
        host=host,
        counts=counts,
        servers=rollout.servers,
        sleeps=rollout.colocate,
        returns_experts=rollout.replay_experts,
        most_masked=rollout.top_k + MASK_TIES if rollout.engine_returns_masks else 0,
        first_device=first_device,
        maps_memory=sync.transport.type == "ipc",
        in_fp8=sync.quantize == "fp8",
        **layers_of(Path(model.path)),
    )


def first_server_device(cfg: RolloutConfig, platform: Platform, world_size: int) -> int:
    """Return the index of the first GPU of the servers that a rank starts: behind the ranks', or with `colocate` on these."""
    first = 0 if cfg.colocate else int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    wanted, present = first + cfg.servers * cfg.server.tp, torch.cuda.device_count()
    if not cfg.server.others and platform == "cuda" and present < wanted:
        raise ConfigError(
            f"{first} ranks, and rollout.servers={cfg.servers} of rollout.server.tp={cfg.server.tp}, "
            f"take {wanted} GPUs, and this machine has {present}; let them take turns (rollout.colocate=true), or give servers "
            "machines of their own (rollout.server.rendezvous)"
        )
    return first


def beginning(cfg: RolloutConfig, log_path: Path) -> list[str]:
    """Return lines for the user: where the engine comes from, and a warning if the servers' memory is not limited."""
    lines = []
    limit = cfg.server.growth_limit_gib
    if isinstance(cfg.server, UrlServerConfig) or (limit and (cfg.server.others or cfg.only)):
        why = "no weights are sent, between which that is done" if cfg.only else "their memory is not known here"
        key = f" (rollout.server.restart_after_growth_gib={limit:g})" if limit else ""
        lines = [f"servers are not restarted when they grow{key}: {why}"]
    return [*lines, _where_from(cfg, log_path)]


def build_engine(cfg: RolloutConfig, launch: LaunchSpec, log_path: Path) -> Fleet:
    """Build the fleet of the config. Its servers are not started yet."""
    apis = [ENGINES[cfg.engine]() for _ in range(cfg.servers)]
    listener: RunListener | None = None
    servers: Sequence[Server]
    if isinstance(cfg.server, UrlServerConfig):
        servers = [NamedServer(name_of(cfg, i), cfg.server, url) for i, url in enumerate(cfg.server.urls)]
    elif isinstance(cfg.server, RendezvousServerConfig):
        listener = RunListener(log_path.parent, cfg.server)
        names = [name_of(cfg, i) for i in range(cfg.servers)]
        servers = [FoundServer(name, cfg.server, launch, listener, engine=cfg.engine) for name in names]
    else:
        servers = local_servers(cfg, apis, launch, log_path)
    endpoints = [Endpoint(server, api, cfg.server, launch.max_model_len) for server, api in zip(servers, apis, strict=True)]
    return Fleet(endpoints, cfg, listener)


def local_servers(
    cfg: RolloutConfig, apis: list[EngineApi], launch: LaunchSpec, log_path: Path, key: str | None = None
) -> list[LocalServer]:
    """Build the servers of this machine, each on its own GPUs."""
    server = cfg.server
    assert isinstance(server, ServerConfig)
    logs = [log_path if cfg.servers == 1 else log_path.with_stem(f"{log_path.stem}-{i}") for i in range(cfg.servers)]
    here = [replace(launch, first_device=launch.first_device + i * server.tp) for i in range(cfg.servers)]
    return [LocalServer(name_of(cfg, i), apis[i], server, here[i], logs[i], key) for i in range(cfg.servers)]


def name_of(cfg: RolloutConfig, i: int) -> str:
    """Return the name of a server in messages."""
    return "the inference server" if cfg.servers == 1 else f"inference server {i}"


def _where_from(cfg: RolloutConfig, log_path: Path) -> str:
    server = cfg.server
    if isinstance(server, UrlServerConfig):
        return f"{cfg.engine} at {', '.join(server.urls)}"
    if isinstance(server, RendezvousServerConfig):
        return f"{cfg.engine}: waiting for `tepo serve` with rollout.servers={cfg.servers} in {server.rendezvous}"
    return f"starting {cfg.engine}; its log: {log_path}"
