"""Check, before anything is started, that the engine supports the model's experts and can return the chosen ones."""

from typing import Literal

from tepo_megatron.config import RolloutConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.types import Routing
from tepo_megatron.weights.families import find_family, read_config


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
