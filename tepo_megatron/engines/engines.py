"""Build the engine that `rollout.engine` names, with servers of this machine, at URLs, or from a rendezvous folder.

It is checked before anything is started that the engine can serve the model and return what the run needs of it. A new engine
is a file with an `EngineApi` and a row in `ENGINES`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from tepo_megatron.base.errors import CheckpointError, ConfigError, ConversionError
from tepo_megatron.base.types import MASK_TIES, Routing
from tepo_megatron.config import ModelConfig, RendezvousServerConfig, RolloutConfig, ServerConfig, SyncConfig, UrlServerConfig
from tepo_megatron.engines.engine_api import EngineApi, LaunchSpec, Platform
from tepo_megatron.engines.servers.endpoint import Endpoint
from tepo_megatron.engines.servers.fleet import Fleet
from tepo_megatron.engines.servers.listener import RunListener
from tepo_megatron.engines.servers.process import LOOPBACK
from tepo_megatron.engines.servers.server import FoundServer, LocalServer, NamedServer, Server
from tepo_megatron.engines.sglang import SglangApi
from tepo_megatron.engines.torch_engine import TorchApi
from tepo_megatron.engines.vllm import VllmApi
from tepo_megatron.models.families import Family, find_family, read_config

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


def check_experts(cfg: RolloutConfig, model_path: str) -> None:
    """Raise ConfigError if the engine would serve a network other than the model's.

    SGLang 0.5's Qwen3-MoE reads neither `mlp_only_layers` nor `decoder_sparse_step`. It gives experts to every layer, and
    experts that are not in the checkpoint keep random weights.
    """
    if cfg.engine != "sglang" or cfg.replay is not None:
        return
    hf_config = read_config(model_path)
    arch = find_family(hf_config).architecture(hf_config)
    if arch.experts is not None and len(arch.experts.sparse_layers) < arch.num_layers:
        dense = sorted(set(range(arch.num_layers)) - set(arch.experts.sparse_layers))
        raise ConfigError(
            f"rollout.engine=sglang: layers {', '.join(map(str, dense))} of the model in model.path={model_path} have no "
            "experts (mlp_only_layers, decoder_sparse_step), which SGLang ignores; use rollout.engine=vllm"
        )


def check_heads(cfg: RolloutConfig, heads: int) -> None:
    """Raise ConfigError if the attention heads cannot be divided among the tensor-parallel ranks of a server."""
    if cfg.replay is None and heads % cfg.server.tp:
        able = [str(tp) for tp in range(1, heads + 1) if heads % tp == 0]
        raise ConfigError(
            f"rollout.server.tp={cfg.server.tp} does not divide the {heads} attention heads of the model; use one of "
            f"{', '.join(able)}"
        )


def replayed_routing(cfg: RolloutConfig, model_path: str, platform: Literal["cpu", "cuda"]) -> Routing | None:
    """Return the routing whose expert choices the engine has to return; None without `rollout.replay_experts`."""
    if not cfg.replay_experts:
        return None
    hf_config = read_config(model_path)
    arch = find_family(hf_config).architecture(hf_config)
    if (experts := arch.experts) is None:
        raise ConfigError(f"rollout.replay_experts=true, and the model in model.path={model_path} has none; set it to false")
    if platform == "cpu" and cfg.engine == "vllm" and cfg.replay is None:
        raise ConfigError(
            "rollout.replay_experts=true: vLLM 0.32 returns experts from its second model runner alone, which needs Triton and "
            "does not start on platform=cpu; use rollout.engine=sglang, or set it to false"
        )
    return Routing(arch.num_layers, experts.sparse_layers, experts.per_token, experts.number)


def check_truncation(cfg: RolloutConfig, vocab_size: int) -> None:
    """Raise ConfigError if the engine would be asked for more log-probs per token than the vocabulary has."""
    if cfg.replay is None and cfg.engine_returns_masks and cfg.top_k + MASK_TIES > vocab_size:
        raise ConfigError(
            f"rollout.top_k={cfg.top_k}: the engine is asked for {MASK_TIES} tokens more, and the model's vocabulary has "
            f"{vocab_size}; lower it to {vocab_size - MASK_TIES}, or set it to -1"
        )


def layers_of(model_path: Path) -> dict[str, bool]:
    """Return the fields of a `LaunchSpec` that the model's family decides; none for an unknown model."""
    family = _family(model_path)
    if family is None:
        return {}
    return {"linear_attention": family.read_linear_attention is not None, "text_only": family.text_config is not None}


def check_linear_attention(cfg: RolloutConfig, model_path: str, platform: Literal["cpu", "cuda"]) -> None:
    """Raise ConfigError if the engine cannot serve a model with linear attention.

    SGLang 0.5.23 imports about ten operators of `sgl_kernel` for the gated delta rule that its CPU build does not have: its
    server ends at the start. On a GPU it has them; there it was not measured. The torch engine pads its batch, and the
    states of linear attention would take the padding in.
    """
    if cfg.replay is not None or cfg.engine == "vllm" or (cfg.engine == "sglang" and platform != "cpu"):
        return
    family = _family(Path(model_path))
    if family is None or family.read_linear_attention is None:
        return
    if cfg.engine == "torch":
        raise ConfigError(
            f"rollout.engine=torch: the model in model.path={model_path} has linear attention (family {family.name}), which it "
            "does not sample with; use rollout.engine=vllm"
        )
    raise ConfigError(
        f"rollout.engine=sglang with platform=cpu: the model in model.path={model_path} has linear attention (family "
        f"{family.name}), for which SGLang's CPU build lacks operators of sgl_kernel; use rollout.engine=vllm"
    )


def _family(model_path: Path) -> Family | None:
    try:
        return find_family(read_config(model_path))
    except (CheckpointError, ConversionError):  # reported where the model is loaded
        return None
