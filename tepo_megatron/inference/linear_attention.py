"""Models with linear attention (hybrids): what their servers are started with, and which engine cannot serve them."""

from pathlib import Path
from typing import Literal

from tepo_megatron.config import RolloutConfig
from tepo_megatron.errors import CheckpointError, ConfigError, ConversionError
from tepo_megatron.weights.families import Family, find_family, read_config


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
