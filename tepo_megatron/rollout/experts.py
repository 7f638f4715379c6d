"""Whether an engine has the experts that the model has, and can tell which it chose: found out before anything is started."""

from __future__ import annotations

from tepo_megatron.config import Config
from tepo_megatron.errors import ConfigError
from tepo_megatron.types import Routing
from tepo_megatron.weights.families import find_family, read_config


def check_experts(cfg: Config) -> None:
    """Raise ConfigError where the engine would serve another network than the model's.

    SGLang 0.5's Qwen3-MoE reads neither `mlp_only_layers` nor `decoder_sparse_step`: it gives experts to every layer, and those
    that have none in the checkpoint stay at random.
    """
    if cfg.rollout.engine != "sglang" or cfg.rollout.replay is not None:
        return
    hf_config = read_config(cfg.model.path)
    family = find_family(hf_config)
    arch = family.architecture(hf_config)
    if arch.experts is not None and len(arch.experts.sparse_layers) < arch.num_layers:
        dense = sorted(set(range(arch.num_layers)) - set(arch.experts.sparse_layers))
        raise ConfigError(
            f"rollout.engine=sglang: layers {', '.join(map(str, dense))} of the model in model.path={cfg.model.path} have no "
            "experts (mlp_only_layers, decoder_sparse_step), which SGLang ignores; use rollout.engine=vllm"
        )


def replayed_routing(cfg: Config) -> Routing | None:
    """What the engine is to tell of each token's experts; None without `rollout.replay_experts`.

    Raises ConfigError for a model without experts, and for an engine that cannot tell them.
    """
    if not cfg.rollout.replay_experts:
        return None
    hf_config = read_config(cfg.model.path)
    arch = find_family(hf_config).architecture(hf_config)
    if arch.experts is None:
        raise ConfigError(
            f"rollout.replay_experts=true, and the model in model.path={cfg.model.path} has none; set it to false"
        )
    if cfg.platform == "cpu" and cfg.rollout.engine == "vllm" and cfg.rollout.replay is None:
        raise ConfigError(
            "rollout.replay_experts=true: vLLM 0.32 returns experts from its second model runner alone, which needs Triton and "
            "does not start on platform=cpu; use rollout.engine=sglang, or set it to false"
        )
    experts = arch.experts
    return Routing(arch.num_layers, experts.sparse_layers, experts.per_token, experts.number)
