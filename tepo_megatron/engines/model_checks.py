"""Check, before anything is started, that the engine can serve the model and return what the run needs of it."""

from pathlib import Path
from typing import Literal

from tepo_megatron.base.errors import CheckpointError, ConfigError, ConversionError
from tepo_megatron.base.types import MASK_TIES, Routing
from tepo_megatron.config import RolloutConfig
from tepo_megatron.models.families import Family, find_family, read_config


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
