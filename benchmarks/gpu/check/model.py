"""A random Qwen3 without a tokenizer, in a shape that fits the platform, and the config of a run with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks._weights import QUICK
from benchmarks.gpu.check.lines import Check
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate

# the shapes of Qwen3
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}


@dataclass(frozen=True)
class Case:
    """A model and the lengths of a step."""

    shape: str
    prompt: int
    response: int
    prompts: int
    samples: int
    tokens: int
    needed: int = 0  # bytes of GPU memory that it takes

    @property
    def folder(self) -> str:
        """Name of the model's folder."""
        return f"model-{self.shape}"


TINY = Case("tiny", 8, 16, 2, 4, 64)
# by task of the part `step`; the first one is that of all other parts
CASES = {
    "cuda": {
        "1.7B, 2k tokens": Case("1.7B", 512, 1536, 8, 8, 8192, 60 * 2**30),
        "0.6B, 4k tokens": Case("0.6B", 512, 3584, 4, 8, 8192, 30 * 2**30),
        "4B, 2k tokens": Case("4B", 512, 1536, 4, 8, 8192, 120 * 2**30),
    },
    "cpu": {"tiny": TINY},
}


def case_of(check: Check) -> Case:
    """Return the case of a task."""
    cases = CASES[check.platform]
    return cases.get(check.task, next(iter(cases.values())))


def random_model(check: Check, case: Case | None = None) -> Path:
    """Return the folder of the model; the first part that needs the model writes it."""
    case = case or case_of(check)
    folder = check.folder / case.folder
    if (folder / "config.json").exists():
        return folder
    shape = QUICK if case.shape == TINY.shape else SHAPES[case.shape] | COMMON
    config = Qwen3Config(**shape, max_position_embeddings=40_960, rope_theta=1e6, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(check.platform):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    partial = check.folder / f"{case.folder}.partial"
    model.save_pretrained(partial)
    del model
    torch.cuda.empty_cache()
    partial.rename(folder)
    return folder


def run_tree(check: Check, model: Path, case: Case | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the config tree of a run on one rank."""
    case = case or case_of(check)
    tree: dict[str, Any] = {
        "name": "gpu-check",
        "platform": check.platform,
        "model": {"path": str(model), "precision": "bf16"},
        "data": {"train": "unused", "max_prompt_tokens": case.prompt},
        "rollout": {
            "prompts_per_step": case.prompts,
            "samples_per_prompt": case.samples,
            "max_response_tokens": 2 * case.response,
        },
        "training": {"minibatch_prompts": case.prompts, "max_tokens_per_microbatch": case.tokens},
        "optimizer": {"lr": 1e-6},
    }
    for name, keys in sections.items():
        tree[name] = tree.get(name, {}) | keys
    return tree


def config_of(check: Check, **sections: dict[str, Any]) -> Config:
    """Return the config of a run on one rank with the random model, which it writes if it is not there."""
    return validate(run_tree(check, random_model(check), None, **sections))
