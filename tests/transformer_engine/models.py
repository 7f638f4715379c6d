"""Two small models whose sizes every FP8 preset accepts, and their actors: as on GPUs, and as on a CPU.

An actor "as on GPUs" is the product's own, built for `platform: cuda` and a mesh that says `cuda`: the same checks, choices of
kernels and defaults as on a GPU. Its tensors live in host memory, as everywhere on the CPU platform.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from tepo_megatron.actor.actor import Actor
from tepo_megatron.actor.offload import ON_CUDA, Offloader
from tepo_megatron.actor.precision import check_shapes
from tepo_megatron.config import Config
from tepo_megatron.config.io import plain, validate
from tepo_megatron.dist.parallel import ParallelDims
from tests.parallel import cases
from tests.tiny import hybrid_config, tiny_model

SHAPE: dict[str, Any] = {
    "vocab_size": cases.VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
# 2 x 256 + 2 x 768 + 2 x 128 rows of projection: a multiple of 128 on each of two ranks, as blockwise FP8 requires
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 128, "linear_num_value_heads": 128, "linear_key_head_dim": 2, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model and the layout on which it is built: each mark of a parameter matters on it."""

    config: PretrainedConfig
    parallel: dict[str, Any]
    ranks: int


MODELS = {
    "qwen3": Model(
        Qwen3Config(**SHAPE, tie_word_embeddings=False), {"tp": 2, "dp": 2, "sequence_parallel": True}, 4
    ),
    "qwen3_moe": Model(
        Qwen3MoeConfig(**SHAPE, **EXPERTS, mlp_only_layers=[1], tie_word_embeddings=False), {"dp": 2, "ep": 2}, 2
    ),
    "qwen3_5": Model(
        hybrid_config(**SHAPE, **HYBRID, tie_word_embeddings=False), {"tp": 2, "dp": 2, "sequence_parallel": True}, 4
    ),
}  # fmt: skip


def write(name: str, folder: Path, scale: float = 4.0) -> Path:
    """Write a random model of this name below `folder`, and return its directory."""
    tiny_model(folder / name, MODELS[name].config, scale=scale)
    return folder / name


def config(
    path: Path,
    parallel: dict[str, Any],
    precision: str,
    platform: str = "cuda",
    fused: bool | None = None,
    **sections: dict[str, Any],
) -> Config:
    """Return the config of `tests/parallel/cases.py` for this model.

    Args:
        fused: megatron.transformer.gradient_accumulation_fusion. None: the platform's default.
    """
    tree = plain(cases.run_config(path, parallel)) | {"platform": platform}
    tree["model"]["precision"] = precision
    for section, keys in sections.items():
        tree[section] |= keys
    if fused is not None:
        tree["megatron"]["transformer"]["gradient_accumulation_fusion"] = fused
    return validate(tree)


def actor(cfg: Config, groups: ParallelDims) -> Actor:
    """Return the actor of this config, as on the config's platform."""
    made = Actor.open(cfg, replace(groups, device=torch.device("cuda", 0)) if cfg.platform == "cuda" else groups)
    check_shapes(made.arch, cfg.model, cfg.parallel)
    return made


def frees_memory(made: Actor) -> None:
    """Have an actor really free what it offloads, to a copy in host memory, as on GPUs."""
    made.offloader = Offloader(made.chunks, made.optimizer, torch.device("cpu"), ON_CUDA)


def linear_modules(chunks: Iterable[torch.nn.Module]) -> list[Any]:
    """Return Transformer Engine's linear modules, grouped ones too."""
    return [m for chunk in chunks for m in chunk.modules() if hasattr(m, "fuse_wgrad_accumulation")]
