"""Predict the engine's bytes on a GPU: weights, KV cache, and the memory that a sleeping engine keeps."""

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.hardware import Gpu
from tepo_megatron.config import AnyServerConfig, RolloutConfig, ServerConfig
from tepo_megatron.doctor.plan import parameters
from tepo_megatron.doctor.plan.gpus import ASSUMED, GIB, Assumptions
from tepo_megatron.doctor.plan.layers import attention_layers
from tepo_megatron.doctor.plan.memory_parts import ELEMENT, MemoryState, PlannedModel
from tepo_megatron.models.ops import Architecture


def engine_weights(model: PlannedModel, tp: int, element: int) -> float:
    """Return the bytes of the engine's weights on each GPU. Norms are replicated, but small enough to count as split.

    Args:
        tp, element: GPUs of the engine, and bytes of a weight.
    """
    return parameters.total_parameters(model.family.rows, model.arch) * element / tp


def kv_bytes(arch: Architecture, tp: int, element: int = 2) -> float:
    """Return the bytes of KV cache per token on each GPU of an engine. With more GPUs than KV heads, heads are replicated.

    Layers with linear attention have none; see `layers.sequence_state_bytes`.

    Args:
        tp, element: GPUs of the engine, and bytes of a cached number.
    """
    return 2 * attention_layers(arch) * max(1.0, arch.num_query_groups / tp) * arch.head_dim * element


def _extra_args(cfg: AnyServerConfig) -> list[str]:
    """Return the additional arguments of the engine; none are known of servers that others start."""
    return cfg.extra_args if isinstance(cfg, ServerConfig) else []


def engine_share(cfg: AnyServerConfig, assumed: Assumptions = ASSUMED) -> float:
    """Return the share of a GPU's memory that the engine takes."""
    words = [part for word in _extra_args(cfg) for part in word.split("=", 1)]
    for option in ("--gpu-memory-utilization", "--mem-fraction-static"):
        if option in words:
            value = [*words, ""][words.index(option) + 1]
            try:
                return float(value)
            except ValueError:
                raise ConfigError(f"rollout.server.extra_args: {option} {value!r} is no number") from None
    return assumed.engine_share


def generating(cfg: AnyServerConfig, dtype: str, model: PlannedModel, gpu: Gpu, assumed: Assumptions = ASSUMED) -> MemoryState:
    """Return the engine's part of a GPU: weights, working memory, and the rest of its share for the KV cache.

    Args:
        dtype: Type of the served weights where the section names none.
    """
    weights = engine_weights(model, cfg.tp, ELEMENT[cfg.precision or dtype])
    if isinstance(cfg, ServerConfig) and cfg.kv_cache_gib is not None:
        cache = cfg.kv_cache_gib * GIB
    else:
        cache = max(0.0, engine_share(cfg, assumed) * gpu.memory - weights - assumed.engine_other)
    return MemoryState("generate", {"engine's weights": weights, "KV cache": cache, "engine's other": assumed.engine_other})


def sleeping_bytes(cfg: RolloutConfig, assumed: Assumptions = ASSUMED) -> int:
    """Return the bytes that a sleeping engine keeps on each GPU. vLLM always starts with --sleep-mode-offload-cudagraph."""
    size = assumed.asleep - (assumed.graphs if cfg.engine == "vllm" else 0)
    if "--enable-nccl-comm-suspend" in _extra_args(cfg.server) and cfg.server.tp > 1:
        size -= assumed.nccl
    return size
