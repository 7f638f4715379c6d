"""Whether the experts that an engine chose can be replayed in training: told before anything is started."""

from __future__ import annotations

from tepo_megatron.config import Config
from tepo_megatron.errors import ConfigError
from tepo_megatron.types import Routing
from tepo_megatron.weights.families import find_family, read_config


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
