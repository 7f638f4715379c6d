"""A random Qwen3 without a tokenizer, in a shape that fits the platform, and the config of a run with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks._weights import QUICK
from benchmarks.gpu.check.lines import Check

# shape of Qwen3-1.7B
SHAPE_1_7B = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip
SHAPE_0_6B = SHAPE_1_7B | {"hidden_size": 1024, "intermediate_size": 3072}
ENOUGH = 60 * 2**30  # bytes of GPU memory that the larger model takes with its optimizer and logits
# mean tokens of a prompt and of a response; prompts per step, samples per prompt; tokens per microbatch
LENGTHS = {"cpu": (8, 16, 2, 4, 64), "cuda": (512, 1536, 8, 8, 8192)}


def random_model(check: Check) -> Path:
    """Return the folder of the model; the first part that needs the model writes it."""
    folder = check.folder / "model"
    if (folder / "config.json").exists():
        return folder
    shape = QUICK
    if check.on_gpu:
        shape = SHAPE_1_7B if torch.cuda.get_device_properties(0).total_memory >= ENOUGH else SHAPE_0_6B
    config = Qwen3Config(**shape, max_position_embeddings=40_960, rope_theta=1e6, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(check.platform):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    partial = check.folder / "model.partial"
    model.save_pretrained(partial)
    del model
    torch.cuda.empty_cache()
    partial.rename(folder)
    return folder


def run_tree(check: Check, model: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the config tree of a run on one rank.

    Args:
        check: Selects the platform.
        model: Folder of the checkpoint.
        sections: Further keys, by section of the config.
    """
    prompt, response, prompts, samples, tokens = LENGTHS[check.platform]
    tree: dict[str, Any] = {
        "name": "gpu-check",
        "platform": check.platform,
        "model": {"path": str(model), "precision": "bf16"},
        "data": {"train": "unused", "max_prompt_tokens": prompt},
        "rollout": {"prompts_per_step": prompts, "samples_per_prompt": samples, "max_response_tokens": 2 * response},
        "training": {"minibatch_prompts": prompts, "max_tokens_per_microbatch": tokens},
        "optimizer": {"lr": 1e-6},
    }
    for name, keys in sections.items():
        tree[name] = tree.get(name, {}) | keys
    return tree
